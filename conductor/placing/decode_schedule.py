"""Who will decode on a node at a later moment: those that are there and not done, and those on their way."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass

# Of a stay that was predicted to take no time.
_LEAST_S = 1e-3


@dataclass(slots=True)
class _Stay:
    starts_s: float
    ends_s: float
    num_tokens: int
    begun: bool = False

    @property
    def lasts_s(self) -> float:
        return self.ends_s - self.starts_s


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
        """It is on its way. ``num_tokens``: of KV, on average while it decodes."""
        self._stays[key] = _Stay(starts_s, max(ends_s, starts_s), num_tokens)

    def begin(self, key: Hashable, now_s: float) -> None:
        """It is there now, whatever was expected; one that is not known is no matter."""
        stay = self._stays.get(key)
        if stay is not None and not stay.begun:
            stay.ends_s = now_s + stay.lasts_s
            stay.starts_s, stay.begun = now_s, True

    def remove(self, key: Hashable) -> None:
        """It has ended, or will not come. Idempotent."""
        self._stays.pop(key, None)

    def batch_at(self, now_s: float, at_s: float, *, without: Hashable = None) -> tuple[float, float]:
        """(sequences, tokens of KV) to expect in the node's batch at ``at_s``, less ``without``: each
        counts with the probability that it is there. At ``now_s`` those that have begun are.
        """
        num_sequences = num_tokens = 0.0
        for key, stay in self._stays.items():
            if key != without:
                probability = _is_there(stay, now_s, at_s)
                num_sequences += probability
                num_tokens += probability * stay.num_tokens
        return num_sequences, num_tokens

    def next_end_s(self, now_s: float) -> float:
        """When the first of those that are there will probably end; ``now_s`` if nobody is."""
        ends = (max(stay.ends_s, now_s) for stay in self._stays.values() if stay.begun)
        return min(ends, default=now_s)


def _is_there(stay: _Stay, now_s: float, at_s: float) -> float:
    """Stays are taken to be without memory: whoever is there leaves within ``lasts_s`` on average, however
    long it has been there. A fixed end for each would make a batch of many look emptier or fuller than it
    will be.
    """
    starts_s = now_s if stay.begun else max(stay.starts_s, now_s)
    if at_s <= now_s:
        return float(stay.begun)
    if at_s < starts_s:
        return 0.0
    return math.exp((starts_s - at_s) / max(stay.lasts_s, _LEAST_S))
