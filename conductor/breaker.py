"""Keeps requests away from a node that just failed, for longer each time it fails again."""

from __future__ import annotations

_FIRST_S = 0.25
_LONGEST_S = 10.0


class Breaker:
    """Closed, it lets requests through. A failure opens it for a while; one success closes it for good."""

    __slots__ = ("_open_until_s", "failures")

    def __init__(self) -> None:
        self.failures = 0  # since the last success
        self._open_until_s = 0.0

    def fail(self, now_s: float) -> None:
        """Failures while it is open are the same trouble seen by other requests, and do not lengthen it."""
        if now_s < self._open_until_s:
            return
        self._open_until_s = now_s + min(_FIRST_S * 2**self.failures, _LONGEST_S)
        self.failures += 1

    def succeed(self) -> None:
        self.failures = 0
        self._open_until_s = 0.0

    def closed(self, now_s: float) -> bool:
        return now_s >= self._open_until_s

    def closes_in_s(self, now_s: float) -> float:
        return max(self._open_until_s - now_s, 0.0)
