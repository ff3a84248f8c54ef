"""Blocks on their way to disk: one queue with one budget of bytes, and the task that empties it."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable

from moonpool.kvstore.blocks.keys import BlockKey
from moonpool.kvstore.tiers import metrics
from moonpool.kvstore.tiers.protocols import DiskTier
from moonpool.kvstore.tiers.write_batch import BlockSources, EvictedBlock, WriteBatch
from moonpool.runtime.errors import MoonpoolError
from moonpool.runtime.failures import FailureClass
from moonpool.runtime.observing import failures
from moonpool.runtime.service.vital import cancel_and_wait, vital

_log = logging.getLogger(__name__)

# Of one durable write: its sync and commit cost as much as a MiB or two.
_BATCH_NBYTES = 8 << 20
_MIN_BATCH_BLOCKS = 16
# So that the disk has data to take while one of them is synced and committed.
_MAX_BATCHES = 3


class WriteQueue:
    """Write blocks, each after its predecessors, so that the disk holds whole prefixes.

    This is the only place that delays or refuses a write: what it gives to the disk begins at once.
    ``used_nbytes``, of blocks queued or being written, is bounded by the budget. ``offer`` and
    ``write_evicted`` never wait: a block without room is not written, and counted. ``submit`` waits for room.
    ``require`` is never refused, and callers wait in ``room`` before they add more.
    """

    def __init__(
        self,
        disk: DiskTier,
        sources: BlockSources,
        *,
        budget_nbytes: int,
        on_finished: Callable[[BlockKey], None],
        sources_settled: Callable[[], Awaitable[None]],
    ) -> None:
        """``on_finished(key)``: the block is on disk now, or its write failed; an evicted one's slot is free.
        ``sources_settled()`` waits for blocks on their way from the pool to host memory."""
        self.evicted = sources.evicted
        self._disk = disk
        self._host = sources.host
        self._sources = sources
        self._on_finished = on_finished
        self._sources_settled = sources_settled
        self._block_nbytes = self._host.layout.block_nbytes
        self._max_blocks = max(budget_nbytes // self._block_nbytes, 1)
        # Slots of evicted blocks cannot be used: they may take a quarter of host memory.
        self._max_demoting = max(min(self._max_blocks, self._host.capacity // 4), 1)
        self._batch_blocks = max(_MIN_BATCH_BLOCKS, _BATCH_NBYTES // self._block_nbytes)
        self._queue: dict[BlockKey, None] = {}
        self._writing: dict[BlockKey, WriteBatch] = {}
        self._required: dict[BlockKey, list[int]] = {}  # host slots pinned for each
        self._pinned: Counter[int] = Counter()  # the same slots: by how many blocks
        self._unwritten: dict[BlockKey, None] = {}  # required blocks after a failed write: tried again
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._finished = asyncio.Event()  # replaced each time a block has left the queue
        self._task: asyncio.Task[None] | None = None
        self._writes: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        self._task = vital(self._run(), "disk-writer")

    async def close(self) -> None:
        """Finish the writes that have begun; blocks still queued are not written."""
        if self._task is None:
            return
        for key in list(self._queue):
            self._refuse(key, "closing")
        task, self._task = self._task, None
        idle = asyncio.create_task(self._idle.wait())
        # Not idle alone: a task that has failed will never be.
        await asyncio.wait((idle, task), return_when=asyncio.FIRST_COMPLETED)
        await cancel_and_wait(idle, task)

    async def drained(self) -> None:
        await self._idle.wait()

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def used_nbytes(self) -> int:
        """Bytes of the blocks that are queued or being written, predecessors included."""
        return (len(self._queue) + len(self._writing)) * self._block_nbytes

    def _has_room(self) -> bool:
        return len(self._queue) + len(self._writing) < self._max_blocks

    @property
    def has_room(self) -> bool:
        """Whether host memory may evict a block by ``write_evicted``."""
        return len(self.evicted) < self._max_demoting and self._has_room() and not self._disk.is_stalled

    def offer(self, key: BlockKey) -> bool:
        """Write this block of host memory or the pool, which keep it. False, counted: there is no room."""
        if key in self._queue or key in self._writing:
            return True
        if not self._has_room() or self._disk.is_stalled:
            metrics.DROPPED_WRITES.labels("stalled" if self._disk.is_stalled else "queue").inc()
            return False
        self._enqueue(key)
        return True

    async def submit(self, key: BlockKey) -> bool:
        """``offer`` as soon as there is room. False: the disk stalls."""
        while not (key in self._queue or key in self._writing or self._has_room() or self._disk.is_stalled):
            await self._finished.wait()
        return self.offer(key)

    def write_evicted(self, key: BlockKey, parent: BlockKey | None, slot: int) -> None:
        """Write a block that host memory evicts at this moment; its slot stays pinned until then."""
        if (before := self.evicted.take(key)) is not None:
            # It was stored again since. A write that has begun keeps the slot pinned by itself.
            self._host.unpin((before.slot,))
        self._host.pin((slot,))
        self.evicted.add(key, EvictedBlock(parent, slot))
        self._enqueue(key)

    def require(self, key: BlockKey) -> None:
        """Write a block of host memory, which cannot evict it before it is written or its write failed."""
        if key in self._disk or key in self._required or key not in self._host:
            return
        # With its predecessors: eviction starts at an unpinned block and takes the end of its chain.
        slots = self._required[key] = self._host.lineage(key)
        self._host.pin(slots)
        self._pinned.update(slots)
        self._enqueue(key)

    async def room(self) -> None:
        """Wait until required blocks pin at most half of host memory; not while the disk stalls."""
        while len(self._pinned) > self._host.capacity // 2 and not self._disk.is_stalled:
            await self._finished.wait()

    def drop_descendants(self, key: BlockKey) -> list[BlockKey]:
        """A block is in no tier any more: forget the evicted blocks directly after it. Returns those."""
        gone = self.evicted.after(key)
        for name in gone:
            metrics.DROPPED_WRITES.labels("orphaned").inc()
            self.forget(name)
        return gone

    def forget(self, key: BlockKey) -> None:
        """The block is removed: do not write it. A write that has begun goes on."""
        self._queue.pop(key, None)
        self._unwritten.pop(key, None)
        self._unpin(key)
        self._wake_waiting()  # there may be room now, and no write under way that would end

    def is_writing(self, keys: Iterable[BlockKey]) -> bool:
        """Whether the write of one of these blocks has begun and not ended."""
        return not self._writing.keys().isdisjoint(keys)

    async def ended(self, keys: Collection[BlockKey]) -> None:
        """Wait until none of these blocks is being written."""
        while self.is_writing(keys):
            await self._finished.wait()

    def _enqueue(self, key: BlockKey) -> None:
        if key not in self._writing:
            self._queue[key] = None
            self._idle.clear()
            self._wake.set()

    async def _run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            await self._sources_settled()
            while len(self._writes) < _MAX_BATCHES and (batch := self._next_batch()) is not None:
                self._writing.update(dict.fromkeys(batch, batch))
                write = asyncio.create_task(self._write(batch), name="disk-write")
                self._writes.add(write)
                write.add_done_callback(self._write_ended)
            if not self._queue and not self._writes:
                self._idle.set()

    def _next_batch(self) -> WriteBatch | None:
        """Take the oldest queued blocks, up to a batch or one run of a chain; None: nothing is queued."""
        batch = WriteBatch(self._disk, self._sources, self._writing)
        for key in list(self._queue):
            if len(batch) >= self._batch_blocks:
                break
            if key in self._queue:
                run = batch.add(key)
                if run is None:
                    self._refuse(key, "gone")
                for each in (key, *(run or ())):
                    self._queue.pop(each, None)
        return batch if batch.asked else None

    async def _write(self, batch: WriteBatch) -> None:
        try:
            await batch.write(self._batch_blocks)
        except MoonpoolError as error:
            _log.warning("blocks were not written to disk: %s", error)
            metrics.DROPPED_WRITES.labels("error").inc()
            failures.count(FailureClass.STORE, "error")
        except Exception:
            # The batch counts as not written. Serving continues without the disk.
            _log.exception("blocks were not written to disk")
            metrics.DROPPED_WRITES.labels("error").inc()
            failures.count(FailureClass.STORE, "error")
        finally:
            batch.release()
            for key in batch:
                del self._writing[key]
            retried: dict[BlockKey, None] = {}
            if self._task is not None and any(key in self._disk for key in batch):
                retried, self._unwritten = self._unwritten, {}
            failed = [key for key in batch if key in self._required and key not in self._disk]
            self._unwritten.update(dict.fromkeys(failed))
            # Predecessors too: one that was removed meanwhile is on disk again.
            for key in dict.fromkeys([*batch.asked, *batch]):
                self._finish(key)
            for key in retried:
                self.require(key)

    def _write_ended(self, write: asyncio.Task[None]) -> None:
        self._writes.discard(write)
        self._wake.set()

    def _finish(self, key: BlockKey) -> None:
        self._unpin(key)
        self._wake_waiting()
        self._on_finished(key)

    def _wake_waiting(self) -> None:
        self._finished.set()
        self._finished = asyncio.Event()

    def _unpin(self, key: BlockKey) -> None:
        evicted = self.evicted.take(key)
        if evicted is not None:
            self._host.unpin((evicted.slot,))
        slots = self._required.pop(key, [])
        self._host.unpin(slots)
        self._pinned.subtract(slots)
        for slot in slots:
            if not self._pinned[slot]:
                del self._pinned[slot]

    def _refuse(self, key: BlockKey, reason: str) -> None:
        metrics.DROPPED_WRITES.labels(reason).inc()
        self._queue.pop(key, None)
        self._finish(key)

    def check_integrity(self) -> None:
        pending = self._queue.keys() | self._writing.keys()
        assert self.evicted.keys() <= pending, "an evicted block is not being written"
        assert self._required.keys() <= pending, "a required block is not being written"
        assert not self._queue.keys() & self._writing.keys(), "a block is queued and being written"
        assert len(self._queue) <= self._max_blocks + len(self._required), "the queue is over its budget"
        assert all(key in self._host for key in self._required), "a required block was evicted"
