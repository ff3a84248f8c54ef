"""Who will decode on a node at a later moment: those that are there and not done, and those on their way."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

# An overdue request lasts at least this much longer: it is there now.
_LEAST_S = 1e-3


@dataclass(slots=True)
class _Stay:
    starts_s: float
    ends_s: float
    num_tokens: int


class DecodeSchedule:
    """The requests given to one decode node, each with when it will probably begin and end.

    Linear in the requests of the node, which its batch size bounds.
    """

    __slots__ = ("_stays",)

    def __init__(self) -> None:
        self._stays: dict[Hashable, _Stay] = {}

    def __len__(self) -> int:
        return len(self._stays)

    def add(self, key: Hashable, *, starts_s: float, ends_s: float, num_tokens: int) -> None:
        """``num_tokens``: of KV, on average while it decodes. Replaces what was known of ``key``."""
        self._stays[key] = _Stay(starts_s, max(ends_s, starts_s), num_tokens)

    def remove(self, key: Hashable) -> None:
        """It has ended, or will not come. Idempotent."""
        self._stays.pop(key, None)

    def batch_at(self, now_s: float, at_s: float, *, without: Hashable = None) -> tuple[int, int]:
        """(sequences, tokens of KV) in the node's batch at ``at_s`` as it looks now, less ``without``."""
        num_sequences = num_tokens = 0
        for key, stay in self._stays.items():
            if key != without and stay.starts_s <= at_s < _likely_end_s(stay, now_s):
                num_sequences += 1
                num_tokens += stay.num_tokens
        return num_sequences, num_tokens

    def next_end_s(self, now_s: float) -> float:
        """When the first of them will probably end; ``now_s`` if there is none."""
        return min((_likely_end_s(stay, now_s) for stay in self._stays.values()), default=now_s)


def _likely_end_s(stay: _Stay, now_s: float) -> float:
    """One that is still there past its end is taken to need as long again from now on."""
    if now_s < stay.ends_s:
        return stay.ends_s
    return now_s + max(stay.ends_s - stay.starts_s, _LEAST_S)
