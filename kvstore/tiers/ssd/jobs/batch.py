"""A batch of block I/O on threads, and the guarantees of a caller that gives up."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, Protocol, TypeVar

from moonpool.kvstore.tiers.ssd.jobs.threads import Worker
from moonpool.runtime.cancellation import outlast

Block = TypeVar("Block")


class Batch:
    """Jobs on threads with one answer on the event loop.

    The caller awaits ``wait()``. The caller and the tier may give up (``abandon``): from then on no thread
    touches the caller's memory, however long the disk takes. ``on_done`` is called on the loop once every job
    has ended, also of an abandoned batch: only then are its slots free of I/O.
    """

    def __init__(self, on_done: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._answered: asyncio.Future[None] = self._loop.create_future()
        self._on_done = [on_done]
        self._lock = threading.Lock()
        self._num_pending = 0
        self._touching = 0
        self.abandoned = False

    async def wait(self) -> bool:
        """Whether every job has ended; False: the batch was abandoned. A cancelled caller abandons it."""
        # A copy that has begun ends even so: it takes microseconds.
        await outlast(self._answered, self.abandon)
        return not self.abandoned

    def abandon(self) -> None:
        with self._lock:
            self.abandoned = True
            touched = self._touching
        if not touched:
            self._answer()

    def begin_touching(self) -> bool:
        """Call before every access of a thread to the caller's memory, and ``end_touching`` after it. False:
        the batch was abandoned, do not touch."""
        with self._lock:
            if self.abandoned:
                return False
            self._touching += 1
            return True

    def end_touching(self) -> None:
        with self._lock:
            self._touching -= 1
            last = self.abandoned and not self._touching
        if last:
            self._loop.call_soon_threadsafe(self._answer)

    def add_jobs(self, count: int) -> None:
        """Call before jobs are given to threads: by the owner, or by a job that has not ended."""
        with self._lock:
            self._num_pending += count

    def job(self, about: str, work: Callable[[], None]) -> ThreadTask[str]:
        """One call to the disk, for a thread."""

        def call(_: list[str], worker: Worker) -> None:
            with worker.calling():
                work()

        return ThreadTask(self, iter([[about]]), call, lambda run: run[0])

    def job_ended(self) -> None:
        with self._lock:
            self._num_pending -= 1
            last = not self._num_pending
        if last:
            self._loop.call_soon_threadsafe(self._finish)

    def when_done(self, call: Callable[[], None]) -> None:
        """Also call this once every job has ended."""
        self._on_done.append(call)

    def _finish(self) -> None:
        for call in self._on_done:
            call()
        self._answer()

    def _answer(self) -> None:
        if not self._answered.done():
            self._answered.set_result(None)


class ThreadTask(Generic[Block]):
    """One thread's part of a batch: it takes the next run of blocks while there is one, so that a batch wakes
    each thread once."""

    def __init__(
        self,
        batch: Batch,
        shared: Iterator[list[Block]],
        work: Callable[[list[Block], Worker], None],
        name: Callable[[list[Block]], str],
    ) -> None:
        """``shared``: a list's iterator, common to all threads. ``name``: describes a run, for the log."""
        self._batch = batch
        self._shared = shared
        self._work = work
        self._name = name
        self._run: list[Block] = []

    @property
    def about(self) -> str:
        return self._name(self._run) if self._run else ""

    def run(self, worker: Worker) -> None:
        try:
            for run in self._shared:
                self._run = run
                self._work(run, worker)
        finally:
            self._batch.job_ended()


class _InSlot(Protocol):
    @property
    def slot(self) -> int: ...


Placed = TypeVar("Placed", bound=_InSlot)


def runs(blocks: Sequence[Placed], slots_per_segment: int, max_slots: int) -> list[list[Placed]]:
    """Group blocks so that each group is one I/O: neighbours in one segment, ``max_slots`` at most."""
    groups: list[list[Placed]] = []
    for block in sorted(blocks, key=lambda block: block.slot):
        last = groups[-1] if groups else []
        follows = last and block.slot == last[-1].slot + 1 and block.slot % slots_per_segment
        if follows and len(last) < max_slots:
            last.append(block)
        else:
            groups.append([block])
    return groups
