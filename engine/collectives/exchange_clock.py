"""The time a rank spends in exchanges with other ranks."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import deque
from dataclasses import dataclass, field

_NUM_SAMPLES = 4096
SECONDS = (*(1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4), *(1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1, 1.0))
"""Upper bounds of the buckets of durations."""
_SECONDS_NS = [round(1e9 * bound) for bound in SECONDS]
_SIZES = [4 << 10, 64 << 10, 1 << 20, 16 << 20]


@dataclass(slots=True)
class ExchangeCounts:
    """Exchanges of one kind and size. buckets: by duration, the last one of those above all bounds."""

    buckets: list[int] = field(default_factory=lambda: [0] * (len(SECONDS) + 1))
    total_ns: int = 0
    nbytes: int = 0


class ExchangeClock:
    """Counts of one rank since its start; ``samples_s`` are the last exchanges' durations.

    counts: by operation, as ``Link`` names it, and by the most bytes of its class of sizes ("inf": any more).

    collective_ns: all exchanges, with waiting for other ranks of the stage. all_to_all_ns: those of them that
    moved tokens to experts and back. bubble_ns: waiting for the stage before.
    """

    def __init__(self) -> None:
        self.num_collectives = 0
        self.collective_nbytes = 0
        self.collective_ns = 0
        self.num_all_to_alls = 0
        self.all_to_all_nbytes = 0
        self.all_to_all_ns = 0
        self.bubble_ns = 0
        self.samples_s: deque[float] = deque(maxlen=_NUM_SAMPLES)
        self.all_to_all_samples_s: deque[float] = deque(maxlen=_NUM_SAMPLES)
        self.counts: dict[tuple[str, str], ExchangeCounts] = {}

    def collective(self, operation: str, began_ns: int, nbytes: int) -> None:
        took_ns = time.perf_counter_ns() - began_ns
        self.num_collectives += 1
        self.collective_nbytes += nbytes
        self.collective_ns += took_ns
        self.samples_s.append(took_ns / 1e9)
        self._count(operation, took_ns, nbytes)

    def _count(self, operation: str, took_ns: int, nbytes: int) -> None:
        size = bisect_left(_SIZES, nbytes)
        key = operation, str(_SIZES[size]) if size < len(_SIZES) else "inf"
        if (counts := self.counts.get(key)) is None:
            counts = self.counts[key] = ExchangeCounts()
        counts.buckets[bisect_left(_SECONDS_NS, took_ns)] += 1
        counts.total_ns += took_ns
        counts.nbytes += nbytes

    def all_to_all(self, began_ns: int, nbytes: int) -> None:
        """``nbytes``: of the rows this rank sent."""
        self.collective("all_to_all", began_ns, nbytes)
        took_s = self.samples_s[-1]
        self.num_all_to_alls += 1
        self.all_to_all_nbytes += nbytes
        self.all_to_all_ns += round(1e9 * took_s)
        self.all_to_all_samples_s.append(took_s)

    def received(self, began_ns: int, waited_ns: int, nbytes: int) -> None:
        """Count hidden states received from the stage before, after waiting for it."""
        took_ns = time.perf_counter_ns() - began_ns
        self.bubble_ns += waited_ns
        self.collective_ns += took_ns - waited_ns
        self._count("receive", took_ns, nbytes)
