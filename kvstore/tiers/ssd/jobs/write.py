"""Blocks on their way to the disk, in an order that survives a kill at any moment.

    delete the records of what the slots had → data → fdatasync → the new records, in one transaction

So no record ever names a slot with another block's bytes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from xxhash import xxh3_64, xxh3_64_intdigest

from moonpool.kvstore.blocks.keys import BlockKey
from moonpool.kvstore.tiers.protocols import Bytes
from moonpool.kvstore.tiers.ssd.files.block_index import BlockIndex, IndexWriteFailed
from moonpool.kvstore.tiers.ssd.files.record import BlockRecord, StaleRecord
from moonpool.kvstore.tiers.ssd.files.segments import CALL_NBYTES, Segments
from moonpool.kvstore.tiers.ssd.jobs.batch import Batch, ThreadTask, runs
from moonpool.kvstore.tiers.ssd.jobs.threads import IoThreads, Worker


@dataclass(slots=True, eq=False)
class NewBlock:
    sequence: int
    key: BlockKey
    parent: BlockKey | None
    slot: int
    source: Bytes
    checksum: int | None  # None: a thread computes it
    is_written: bool = False
    is_stored: bool = False  # durable, and in the index
    error: OSError | None = None

    def record(self) -> BlockRecord:
        assert self.checksum is not None
        return BlockRecord(self.sequence, self.key, self.slot, self.checksum, self.parent)


class WriteJob:
    """Write blocks. ``stale``: records of the slots to be written; ``also_gone``: of other slots.

    If the slots have been free for a while, ``stale`` is empty and there is only one transaction.
    """

    def __init__(
        self,
        blocks: Sequence[NewBlock],
        stale: Sequence[StaleRecord],
        also_gone: Sequence[StaleRecord],
        segments: Segments,
        index: BlockIndex,
        max_run: int,
        on_done: Callable[[WriteJob], None],
    ) -> None:
        self.blocks = blocks
        self.stale = stale
        self.also_gone = also_gone
        self.is_invalidated = not stale
        self.is_committed = False
        self.error: IndexWriteFailed | OSError | None = None  # of the index, or of a sync
        self._segments = segments
        self._index = index
        self._runs = runs(blocks, segments.shape.slots_per_segment, max_run)
        self._lock = threading.Lock()
        self._num_awaited = len(self._runs)  # before the commit
        self.batch = Batch(lambda: on_done(self))

    def begin(self, data: IoThreads, commits: IoThreads, after: Iterable[WriteJob]) -> None:
        """Start. ``commits``: one thread, so that transactions keep their order. ``after``: jobs that have
        not ended, with predecessors of these blocks, which are stored first."""
        self._data, self._commits = data, commits
        for other in after:
            self._num_awaited += 1
            other.batch.when_done(self._prerequisite_done)
        if self.stale:
            self.batch.add_jobs(1)
            commits.submit(self.batch.job(f"writing {self._index.path}", self._invalidate))
        else:
            self._submit_data()

    def _invalidate(self) -> None:
        if self.batch.abandoned:
            return
        try:
            self._index.apply(gone=self.stale)
        except IndexWriteFailed as error:
            self.error = error
            return
        self.is_invalidated = True
        self._submit_data()

    def _submit_data(self) -> None:
        shared = iter(self._runs)
        num_tasks = min(self._data.num_threads, len(self._runs))
        self.batch.add_jobs(num_tasks + 1)  # the commit
        for _ in range(num_tasks):
            self._data.submit(ThreadTask(self.batch, shared, self._write, self._name))

    def _name(self, run: Sequence[NewBlock]) -> str:
        path, offset = self._segments.where(run[0].slot)
        return f"writing {path} at {offset}"

    def _write(self, run: Sequence[NewBlock], worker: Worker) -> None:
        slots_nbytes = len(run) * self._segments.shape.slot_nbytes
        call_chunks = (
            self._chunked(run[0], worker.buffer) if len(run) == 1 else self._joined(run, worker.buffer)
        )
        done = 0
        try:
            for call_chunk in call_chunks:
                with worker.calling():
                    self._segments.write(run[0].slot, call_chunk.data, at=done)
                done += len(call_chunk)
        except OSError as error:
            for block in run:
                block.error = error
        if done == slots_nbytes:
            for block in run:
                block.is_written = True
        self._prerequisite_done()

    def _prerequisite_done(self) -> None:
        with self._lock:
            self._num_awaited -= 1
            last = not self._num_awaited
        if last:
            self._commits.submit(self.batch.job(f"syncing {self._segments.directory}", self._commit))

    # Blocks are copied into the thread's own memory, which the disk reads faster. The copy ends early when
    # the batch is abandoned.

    def _chunked(self, block: NewBlock, buffer: Bytes) -> Iterator[Bytes]:
        """Yield a block's slot in chunks that stay in the CPU cache until they are written."""
        block_nbytes, slot_nbytes = len(block.source), self._segments.shape.slot_nbytes
        digest = None if block.checksum is not None else xxh3_64()
        for at in range(0, slot_nbytes, CALL_NBYTES):
            if not self.batch.begin_touching():
                return
            call_chunk = buffer[: min(CALL_NBYTES, slot_nbytes - at)]
            part = call_chunk[: block_nbytes - at]
            np.copyto(part, block.source[at : at + len(part)])
            self.batch.end_touching()
            call_chunk[len(part) :] = 0
            if digest is not None:
                digest.update(part.data)
            yield call_chunk
        if digest is not None:
            block.checksum = digest.intdigest()

    def _joined(self, run: Sequence[NewBlock], buffer: Bytes) -> Iterator[Bytes]:
        """Yield the slots of a run of small blocks as one chunk."""
        slot_nbytes = self._segments.shape.slot_nbytes
        if not self.batch.begin_touching():
            return
        for position, block in enumerate(run):
            slot = buffer[position * slot_nbytes : (position + 1) * slot_nbytes]
            block_nbytes = len(block.source)
            np.copyto(slot[:block_nbytes], block.source)
            slot[block_nbytes:] = 0
            if block.checksum is None:
                block.checksum = xxh3_64_intdigest(slot[:block_nbytes].data)
        self.batch.end_touching()
        yield buffer[: len(run) * slot_nbytes]

    def _commit(self) -> None:
        if self.batch.abandoned:
            return
        failed: set[BlockKey] = set()
        good: list[NewBlock] = []
        for block in self.blocks:
            if block.is_written and block.parent not in failed:
                good.append(block)
            else:
                failed.add(block.key)
        if not good:
            return
        try:
            self._segments.sync(block.slot for block in good)
            self._index.apply(gone=self.also_gone, stored=[block.record() for block in good])
        except (IndexWriteFailed, OSError) as error:
            self.error = error
            return
        self.is_committed = True
        for block in good:
            block.is_stored = True
