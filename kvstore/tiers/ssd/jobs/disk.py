"""The disk of a tier: its threads, the batches under way, and whether it answers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from moonpool.kvstore.tiers.ssd.files.block_index import IndexWriteFailed
from moonpool.kvstore.tiers.ssd.files.record import StaleRecord
from moonpool.kvstore.tiers.ssd.files.segments import CALL_NBYTES
from moonpool.kvstore.tiers.ssd.files.startup import OpenDirectory
from moonpool.kvstore.tiers.ssd.jobs.batch import Batch
from moonpool.kvstore.tiers.ssd.jobs.read import ReadJob, WantedBlock
from moonpool.kvstore.tiers.ssd.jobs.threads import IoThreads
from moonpool.kvstore.tiers.ssd.jobs.write import NewBlock, WriteJob
from moonpool.runtime.failures import FailureClass
from moonpool.runtime.observing import failures

log = logging.getLogger(__name__)


class Disk:
    """Every method returns when the disk has answered, or when one of its calls has taken longer than
    ``deadline_s``: then all batches are abandoned, and none begins until that call returns."""

    def __init__(
        self, opened: OpenDirectory, *, depth: int, deadline_s: float, clock: Callable[[], float]
    ) -> None:
        self.segments = opened.segments
        self.directory: Path = opened.segments.directory
        self.is_stalled = False
        self.num_stalls = 0
        self._opened = opened
        self._index = opened.index
        self._deadline_s = deadline_s
        shape = opened.segments.shape
        self._max_run = max(CALL_NBYTES // shape.slot_nbytes, 1)
        self._data = IoThreads("ssd", depth, self._max_run * shape.slot_nbytes, clock)
        self._commits = IoThreads("ssd-index", 1, 0, clock)
        self._under_way: set[Batch] = set()
        self._idle = asyncio.Event()
        self._watcher: asyncio.TimerHandle | None = None

    async def read(self, wanted: Sequence[WantedBlock], on_done: Callable[[], None]) -> None:
        """Read and verify. Outcomes are in ``wanted``; none where the read was abandoned or not begun.

        ``on_done`` is called once, when no thread works on it any more: before this returns unless abandoned.
        """
        if self.is_stalled:
            on_done()
            return
        reading = ReadJob(wanted, self.segments, self._max_run, on_done)
        self._watch_over(reading.batch)
        reading.begin(self._data)
        await reading.batch.wait()

    def write(
        self,
        blocks: Sequence[NewBlock],
        after: Iterable[WriteJob],
        stale: Sequence[StaleRecord],
        also_gone: Sequence[StaleRecord],
        on_done: Callable[[WriteJob], None],
    ) -> WriteJob:
        """Begin to write; await the ``batch`` of the returned job: then each block is stored, failed or
        abandoned. ``after``: jobs that must be stored first. ``on_done`` is called once, when no thread works
        on it any more."""
        writing = WriteJob(blocks, stale, also_gone, self.segments, self._index, self._max_run, on_done)
        self._watch_over(writing.batch)
        writing.begin(self._data, self._commits, after)
        return writing

    async def ended(self, batch: Batch) -> bool:
        """Wait until a batch of another caller has ended. False: the disk stalls."""
        if self.is_stalled:
            return False
        waiting = Batch(lambda: None)
        self._watch_over(waiting)
        waiting.add_jobs(1)
        batch.when_done(waiting.job_ended)
        return await waiting.wait()

    async def forget(self, gone: Sequence[StaleRecord], on_done: Callable[[], None]) -> bool:
        """Delete records durably. False: abandoned, or failed, which is logged. ``on_done`` is called after
        success."""

        def work() -> None:
            try:
                self._index.apply(gone=gone)
                done.append(True)
            except IndexWriteFailed as error:
                log.error("%s", error)

        done: list[bool] = []
        batch = Batch(lambda: on_done() if done else None)
        return await self._commit(batch, work) and bool(done)

    async def grow(self, on_done: Callable[[OSError | IndexWriteFailed | None], None]) -> None:
        """Make one more segment. ``on_done`` gets the error, or None."""

        def work() -> None:
            try:
                self.segments.grow()
            except OSError as error:
                errors.append(error)
                return
            try:
                self._index.apply(num_segments=self.segments.num_segments)
            except IndexWriteFailed as error:
                self.segments.undo_grow()
                errors.append(error)

        errors: list[OSError | IndexWriteFailed] = []
        await self._commit(Batch(lambda: on_done(errors[0] if errors else None)), work)

    async def _commit(self, batch: Batch, work: Callable[[], None]) -> bool:
        self._watch_over(batch)
        batch.add_jobs(1)
        self._commits.submit(batch.job(f"writing {self._index.path}", work))
        return await batch.wait()

    def _watch_over(self, batch: Batch) -> None:
        self._under_way.add(batch)
        self._idle.clear()
        batch.when_done(lambda: self._done(batch))
        if self._watcher is None:
            self._watch_later()

    def _done(self, batch: Batch) -> None:
        self._under_way.discard(batch)
        if not self._under_way:
            self._idle.set()

    def _watch_later(self) -> None:
        self._watcher = asyncio.get_running_loop().call_later(self._deadline_s / 4, self._watch)

    def _watch(self) -> None:
        self._watcher = None
        held_s, about = max(self._data.longest(), self._commits.longest())
        if held_s > self._deadline_s:
            if not self.is_stalled:
                self.is_stalled = True
                self.num_stalls += 1
                failures.count(FailureClass.STORE, "late")
                message = "%s: no answer for %.1f s (%s); its blocks are misses until there is one"
                log.error(message, self.directory, held_s, about)
            for batch in self._under_way:
                batch.abandon()
        elif self.is_stalled:
            self.is_stalled = False
            log.warning("%s answers again", self.directory)
        if self._under_way or self.is_stalled:
            self._watch_later()

    async def close(self) -> None:
        """Finish the batches under way. If a call hangs, the directory stays locked until this process ends,
        because the late call may still write."""
        while self._under_way and not self.is_stalled:
            try:
                await asyncio.wait_for(self._idle.wait(), self._deadline_s / 4)
            except TimeoutError:
                continue
        if self._watcher is not None:
            self._watcher.cancel()
        ended = [await asyncio.to_thread(t.close, self._deadline_s) for t in (self._data, self._commits)]
        if all(ended):
            self._opened.close()
        else:
            log.error("%s is closed while a call to its disk hangs; it stays locked", self.directory)
