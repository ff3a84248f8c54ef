"""The time a rank spends in exchanges with other ranks."""

from __future__ import annotations

import time
from collections import deque

_NUM_SAMPLES = 4096


class ExchangeClock:
    """Counts of one rank since its start; ``samples_s`` are the last exchanges' durations.

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

    def collective(self, began_ns: int, nbytes: int) -> None:
        took_ns = time.perf_counter_ns() - began_ns
        self.num_collectives += 1
        self.collective_nbytes += nbytes
        self.collective_ns += took_ns
        self.samples_s.append(took_ns / 1e9)

    def extend_last(self, began_ns: int) -> None:
        """Add the time since ``began_ns`` to the exchange counted last."""
        took_ns = time.perf_counter_ns() - began_ns
        self.collective_ns += took_ns
        self.samples_s[-1] += took_ns / 1e9

    def all_to_all(self, began_ns: int, nbytes: int) -> None:
        """``nbytes``: of the rows this rank sent."""
        self.collective(began_ns, nbytes)
        took_s = self.samples_s[-1]
        self.num_all_to_alls += 1
        self.all_to_all_nbytes += nbytes
        self.all_to_all_ns += round(1e9 * took_s)
        self.all_to_all_samples_s.append(took_s)

    def received(self, began_ns: int, waited_ns: int) -> None:
        """Count hidden states received from the stage before, after waiting for it."""
        self.bubble_ns += waited_ns
        self.collective_ns += time.perf_counter_ns() - began_ns - waited_ns
