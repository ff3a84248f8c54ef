"""Where a rank's time goes: what its exchanges with other ranks took."""

from __future__ import annotations

import time
from collections import deque

_KEPT = 4096


class ExchangeClock:
    """Counts of one rank since its start; ``samples_s`` are the last exchanges' durations.

    collective_ns: exchanges whose data was there, or was being made (all-reduce, gather, send).
    bubble_ns: waiting for the stage before to have something at all.
    """

    def __init__(self) -> None:
        self.num_collectives = 0
        self.collective_nbytes = 0
        self.collective_ns = 0
        self.bubble_ns = 0
        self.samples_s: deque[float] = deque(maxlen=_KEPT)

    def collective(self, began_ns: int, nbytes: int) -> None:
        took_ns = time.perf_counter_ns() - began_ns
        self.num_collectives += 1
        self.collective_nbytes += nbytes
        self.collective_ns += took_ns
        self.samples_s.append(took_ns / 1e9)

    def bubble(self, began_ns: int) -> None:
        self.bubble_ns += time.perf_counter_ns() - began_ns
