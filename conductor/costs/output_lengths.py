"""Expected output lengths, learned from finished requests by the length of their prompts."""

from __future__ import annotations

from collections import deque

# Outputs kept for each power of two of prompt tokens: about the last minutes of a busy conductor.
_KEPT = 256
# With fewer outputs of its kind, a request is judged by all outputs.
_ENOUGH = 16
# Before any request has finished.
_UNKNOWN = 128


class OutputLengths:
    """Predicts how many more tokens a request will produce."""

    __slots__ = ("_all", "_by_prompt")

    def __init__(self) -> None:
        self._all = _Recent()
        self._by_prompt: dict[int, _Recent] = {}

    def observe(self, num_prompt_tokens: int, num_tokens: int) -> None:
        """A request with such a prompt ended by itself after ``num_tokens`` of output."""
        self._all.add(num_tokens)
        self._by_prompt.setdefault(num_prompt_tokens.bit_length(), _Recent()).add(num_tokens)

    def expected(self, num_prompt_tokens: int, so_far: int, limit: int) -> int:
        """Further tokens of a request that has produced ``so_far`` and may still produce ``limit``.

        The mean over the outputs that were longer than ``so_far``; without any, as many again as there are.
        From 1 to ``limit``.
        """
        kind = self._by_prompt.get(num_prompt_tokens.bit_length())
        lengths = kind if kind is not None and len(kind) >= _ENOUGH else self._all
        return max(1, min(limit, lengths.remaining(so_far)))


class _Recent:
    """The latest lengths and their sum."""

    __slots__ = ("_lengths", "_sum")

    def __init__(self) -> None:
        self._lengths: deque[int] = deque()
        self._sum = 0

    def __len__(self) -> int:
        return len(self._lengths)

    def add(self, length: int) -> None:
        self._lengths.append(length)
        self._sum += length
        if len(self._lengths) > _KEPT:
            self._sum -= self._lengths.popleft()

    def remaining(self, so_far: int) -> int:
        if not self._lengths:
            return max(_UNKNOWN, so_far)
        if not so_far:
            return round(self._sum / len(self._lengths))
        further = [length - so_far for length in self._lengths if length > so_far]
        return round(sum(further) / len(further)) if further else so_far
