"""The threads of an agent that copy memory, and how much of a batch each of them copies."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

from moonpool.transfer.copying.memcpy import SLICE_NBYTES
from moonpool.transfer.memory.chunks import Chunking
from moonpool.transfer.metrics import moving_average
from moonpool.transfer.native.compiled_copy import compiled_copy

# One batch in so many tries another number of threads, because their speed changes.
_EXPLORE_EVERY = 32
# A further thread takes a core from the computation, so it must gain at least this much.
_CLEARLY_FASTER = 1.15
# A smaller batch is done before a second thread has started.
_MIN_SHARED_NBYTES = 8 << 20
# Handing a smaller batch to a thread takes longer than the copy on the event loop's thread: 0.1 ms.
INLINE_NBYTES = 1 << 20
INLINE_ROWS = 256
# Without the compiled copy verifying is a second pass. Small chunks are still in the cache then.
_VERIFIED_CHUNK_NBYTES = 2 << 20
_VERIFIED_CHUNK_ROWS = 1024
_MAX_CHUNK_NBYTES = 32 << 20
_MAX_CHUNK_ROWS = 16 * 1024


def is_small(nbytes: int, num_rows: int) -> bool:
    """Whether the event loop's thread copies the batch itself."""
    return nbytes <= INLINE_NBYTES and num_rows <= INLINE_ROWS


def copy_chunking(nbytes: int, verified: bool) -> Chunking:
    """The ``Path.chunking`` of copied batches."""
    if verified and compiled_copy() is None:
        return Chunking(_VERIFIED_CHUNK_NBYTES, _VERIFIED_CHUNK_ROWS, whole_spans=True)
    chunk_nbytes = min(max(nbytes // 4, SLICE_NBYTES), _MAX_CHUNK_NBYTES)
    return Chunking(chunk_nbytes, _MAX_CHUNK_ROWS, whole_spans=verified)


class ThreadTuner:
    """Choose the number of threads of a large copy by the measured speed of earlier ones.

    One core saturates the memory bus of some machines and a third of it on others.
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
        untried = [count for count in range(1, self._most + 1) if count not in self._speed]
        if untried:
            return untried[0]
        if self._turn % _EXPLORE_EVERY == 0:
            return 1 + (self._turn // _EXPLORE_EVERY) % self._most
        best = 1
        for count in range(2, self._most + 1):
            if self._speed[count] > self._speed[best] * _CLEARLY_FASTER:
                best = count
        return best

    def record(self, count: int, speed: float) -> None:
        """A batch on ``count`` threads moved ``speed`` bytes/s."""
        self._speed[count] = moving_average(self._speed.get(count, 0.0), speed)


class CopyPool:
    """Threads that start when first needed and sleep when idle."""

    def __init__(self, num_threads: int) -> None:
        self._tuner = ThreadTuner(num_threads)
        self._num_threads = num_threads
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    def choose(self, nbytes: int, num_chunks: int) -> tuple[int, Callable[[], None]]:
        """(number of threads for a batch, function to call at its end)."""
        if nbytes < _MIN_SHARED_NBYTES:
            return 1, lambda: None
        count, started = min(self._tuner.choose(), num_chunks), time.perf_counter()
        return count, lambda: self._tuner.record(count, nbytes / (time.perf_counter() - started))

    def submit(self, work: Callable[[], None]) -> None:
        """Run ``work``, which must not raise, on one of the threads. Call on the event loop's thread."""
        self._work.put(work)
        if len(self._threads) < self._num_threads:
            thread = threading.Thread(target=self._run, name="moonpool copy", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _run(self) -> None:
        while work := self._work.get():
            work()
            # An idle thread must not keep a batch's memory alive.
            del work

    def close(self) -> None:
        """Finish submitted work and end the threads. Idempotent."""
        for _ in self._threads:
            self._work.put(None)
        for thread in self._threads:
            thread.join()
        self._threads.clear()
