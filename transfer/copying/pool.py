"""The threads that copy memory for an agent, and how many of them one batch is worth."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

# Weight of the newest batch in the moving average.
_NEW_WEIGHT = 0.2
# One batch in so many is copied with another number of threads, to see whether that has become faster.
_EXPLORE_EVERY = 32
# More threads take a core from the computation: they must earn it.
_CLEARLY_FASTER = 1.15
# Below this a second thread has started when the first is done.
_MIN_SHARED_NBYTES = 8 << 20


class Lanes:
    """How many threads copy one large batch, learned from what batches reached.

    One core fills the memory bus of some machines and a third of it on others; and cores are busy or not.
    """

    def __init__(self, most: int) -> None:
        self._speed: dict[int, float] = {}
        self._most = most
        self._turn = 0

    def choose(self) -> int:
        """Number of threads for the next batch."""
        if self._most == 1:
            return 1
        self._turn += 1
        untried = [lanes for lanes in range(1, self._most + 1) if lanes not in self._speed]
        if untried:
            return untried[0]
        if self._turn % _EXPLORE_EVERY == 0:
            return 1 + (self._turn // _EXPLORE_EVERY) % self._most
        best = 1
        for lanes in range(2, self._most + 1):
            if self._speed[lanes] > self._speed[best] * _CLEARLY_FASTER:
                best = lanes
        return best

    def record(self, lanes: int, speed: float) -> None:
        """A batch on ``lanes`` threads moved ``speed`` bytes/s."""
        old = self._speed.get(lanes, speed)
        self._speed[lanes] = old + _NEW_WEIGHT * (speed - old)


class CopyPool:
    """Threads that start when first needed and sleep when idle."""

    def __init__(self, num_threads: int) -> None:
        self.lanes = Lanes(num_threads)
        self._num_threads = num_threads
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    def choose(self, nbytes: int, num_chunks: int) -> tuple[int, Callable[[], None]]:
        """How many threads a batch is worth, and what to call at its end."""
        if nbytes < _MIN_SHARED_NBYTES:
            return 1, lambda: None
        lanes, started = min(self.lanes.choose(), num_chunks), time.perf_counter()
        return lanes, lambda: self.lanes.record(lanes, nbytes / (time.perf_counter() - started))

    def submit(self, work: Callable[[], None]) -> None:
        """Run ``work``, which may not raise, on one of the threads. Call on the event loop's thread."""
        self._work.put(work)
        if len(self._threads) < self._num_threads:
            thread = threading.Thread(target=self._run, name="moonpool copy", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _run(self) -> None:
        while work := self._work.get():
            work()
            # Nobody's memory is kept while there is nothing to do.
            del work

    def close(self) -> None:
        """Finish what was submitted and end the threads. Idempotent."""
        for _ in self._threads:
            self._work.put(None)
        for thread in self._threads:
            thread.join()
        self._threads.clear()
