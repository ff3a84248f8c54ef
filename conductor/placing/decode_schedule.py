"""When the requests placed on a decode node will probably be in its batch."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass

# The shortest residency, where none is predicted.
_LEAST_S = 1e-3


@dataclass(slots=True)
class _Residency:
    starts_s: float
    ends_s: float
    num_tokens: int
    tbt_s: float
    begun: bool = False

    @property
    def lasts_s(self) -> float:
        return self.ends_s - self.starts_s

    def probability(self, now_s: float, at_s: float) -> float:
        """Of being in the batch at ``at_s``. Residencies are memoryless: a running request ends within
        ``lasts_s`` on average, however long it has run. With fixed ends, predictions for large batches would
        be too high or too low.
        """
        if at_s <= now_s:
            return float(self.begun)
        starts_s = now_s if self.begun else max(self.starts_s, now_s)
        if at_s < starts_s:
            return 0.0
        return math.exp((starts_s - at_s) / max(self.lasts_s, _LEAST_S))


class DecodeSchedule:
    """The requests of one decode node with their probable begin and end. Operations are linear in them."""

    __slots__ = ("_residencies",)

    def __init__(self) -> None:
        self._residencies: dict[Hashable, _Residency] = {}

    def __len__(self) -> int:
        return len(self._residencies)

    def add(
        self, key: Hashable, *, starts_s: float, ends_s: float, num_tokens: int, tbt_s: float = math.inf
    ) -> None:
        """Expect a request. ``num_tokens``: of KV, on average while it decodes. ``tbt_s``: its SLO."""
        self._residencies[key] = _Residency(starts_s, max(ends_s, starts_s), num_tokens, tbt_s)

    def begin(self, key: Hashable, now_s: float) -> None:
        """The request is in the batch; an unknown key is ignored."""
        residency = self._residencies.get(key)
        if residency is not None and not residency.begun:
            residency.ends_s = now_s + residency.lasts_s
            residency.starts_s, residency.begun = now_s, True

    def remove(self, key: Hashable) -> None:
        """The request has ended, or will not come. Idempotent."""
        self._residencies.pop(key, None)

    def batch_at(self, now_s: float, at_s: float, *, without: Hashable = None) -> tuple[float, float]:
        """Expected (sequences, tokens of KV) in the batch at ``at_s``, without the request ``without``."""
        num_sequences = num_tokens = 0.0
        for key, residency in self._residencies.items():
            if key != without:
                probability = residency.probability(now_s, at_s)
                num_sequences += probability
                num_tokens += probability * residency.num_tokens
        return num_sequences, num_tokens

    def least_tbt_s(self) -> float:
        """The shortest SLO of its requests; infinite: none has one. One batch keeps it for all."""
        return min((residency.tbt_s for residency in self._residencies.values()), default=math.inf)

    def wait_s(self, num_ends: int) -> float:
        """How long so many ends of running requests probably take; 0 while none runs."""
        rate = sum(1 / max(one.lasts_s, _LEAST_S) for one in self._residencies.values() if one.begun)
        return num_ends / rate if rate else 0.0

    def next_end_s(self, now_s: float) -> float:
        """When the first running request will probably end; ``now_s`` if none runs."""
        ends = (max(residency.ends_s, now_s) for residency in self._residencies.values() if residency.begun)
        return min(ends, default=now_s)
