"""A batch of block I/O on its way through threads, and what its caller may rely on when it gives up."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from moonpool.kvstore.tiers.ssd.jobs.threads import Worker

Block = TypeVar("Block")


class Batch:
    """Some jobs on threads, one answer on the event loop.

    The caller waits for ``wait()``. It may give up, and so may the tier (``abandon``): from then on no thread
    touches the caller's memory, however long the disk takes. ``on_done`` is called on the loop when every
    job has ended, also of a batch given up: only then are its slots free of I/O.
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
        """Whether every job has ended; False when the batch was given up. A cancelled caller gives it up."""
        try:
            await asyncio.shield(self._answered)
        except asyncio.CancelledError:
            self.abandon()
            # A copy that has begun is let end: microseconds, never the disk.
            await self._answered
            raise
        return not self.abandoned

    def abandon(self) -> None:
        with self._lock:
            self.abandoned = True
            touched = self._touching
        if not touched:
            self._answer()

    def begin_touching(self) -> bool:
        """Before every access of a thread to the caller's memory, which ``end_touching`` ends. False: it was
        given up, and must not be touched."""
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
        """Before they are given to threads: by the owner, or by a job that has not ended."""
        with self._lock:
            self._num_pending += count

    def job(self, about: str, work: Callable[[], None]) -> BatchJob:
        """One of this batch's jobs, for a thread."""
        return BatchJob(self, about, work)

    def job_ended(self) -> None:
        with self._lock:
            self._num_pending -= 1
            last = not self._num_pending
        if last:
            self._loop.call_soon_threadsafe(self._finish)

    def when_done(self, call: Callable[[], None]) -> None:
        """Call this as well when every job has ended."""
        self._on_done.append(call)

    def _finish(self) -> None:
        for call in self._on_done:
            call()
        self._answer()

    def _answer(self) -> None:
        if not self._answered.done():
            self._answered.set_result(None)


@dataclass(slots=True)
class BatchJob:
    batch: Batch
    about: str
    work: Callable[[], None]

    def run(self, worker: Worker) -> None:
        try:
            with worker.calling():
                self.work()
        finally:
            self.batch.job_ended()


class ThreadTask(Generic[Block]):
    """One thread's part of a batch: it takes the next run of blocks as long as there is one, so that a batch
    wakes each thread once."""

    def __init__(
        self,
        batch: Batch,
        shared: Iterator[list[Block]],
        work: Callable[[list[Block], Worker], None],
        name: Callable[[list[Block]], str],
    ) -> None:
        """``shared``: a list's iterator, the same for all threads. ``name``: a run, for the log."""
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


def runs(slots: Sequence[int], slots_per_segment: int, max_slots: int) -> Iterator[list[int]]:
    """Positions in ``slots``, grouped so that each group is one I/O: neighbours in one segment, in order,
    ``max_slots`` at most."""
    group: list[int] = []
    for position in sorted(range(len(slots)), key=slots.__getitem__):
        if group:
            slot, before = slots[position], slots[group[-1]]
            if slot != before + 1 or not slot % slots_per_segment or len(group) == max_slots:
                yield group
                group = []
        group.append(position)
    if group:
        yield group
