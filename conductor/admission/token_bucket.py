"""Tokens a minute: what a tenant may still use."""

from __future__ import annotations


class TokenBucket:
    """A bucket of a minute's tokens that refills evenly. It may go into debt: outputs end where they end."""

    __slots__ = ("_left", "_per_s", "_since_s", "_size")

    def __init__(self, tokens_per_minute: int, now_s: float) -> None:
        self._size = float(tokens_per_minute)
        self._per_s = tokens_per_minute / 60
        self._left = self._size
        self._since_s = now_s

    def wait_s(self, now_s: float) -> float:
        """0: there are tokens left; otherwise seconds until there are."""
        self._refill(now_s)
        return 0.0 if self._left > 0 else (1 - self._left) / self._per_s

    def use(self, num_tokens: int, now_s: float) -> None:
        self._refill(now_s)
        self._left -= num_tokens

    def _refill(self, now_s: float) -> None:
        self._left = min(self._size, self._left + (now_s - self._since_s) * self._per_s)
        self._since_s = now_s
