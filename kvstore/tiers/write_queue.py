"""Blocks on their way to disk: a bounded queue, and the task that empties it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from moonpool.kvstore.blocks.keys import BlockKey
from moonpool.kvstore.tiers import metrics
from moonpool.kvstore.tiers.copier import Copier
from moonpool.kvstore.tiers.host import HostTier
from moonpool.kvstore.tiers.in_transit import InTransit
from moonpool.kvstore.tiers.protocols import DiskTier, PoolTier
from moonpool.kvstore.tiers.write_batch import Source, WriteBatch
from moonpool.runtime.errors import MoonpoolError

_log = logging.getLogger(__name__)

# Of one durable write: its sync and commit cost as much as a MiB or two.
_BATCH_NBYTES = 8 << 20
_MIN_BATCH_BLOCKS = 16
# So that the disk has data to take while one of them is synced and committed.
_MAX_BATCHES = 3


@dataclass(frozen=True, slots=True)
class Leaving:
    """A block that host memory has evicted, and where its bytes still are."""

    parent: BlockKey | None
    slot: int


class DiskWriter:
    """Writes blocks, and with each the blocks before it that are not on disk yet: so the disk holds whole
    prefixes, and what is read back after a restart can be used.

    Two kinds are queued: blocks that stay where they are (``offer``), and blocks evicted from host memory
    whose slots stay pinned until they are written (``take_over``). Nobody ever waits for the queue: what does
    not fit is not written, and counted.
    """

    def __init__(
        self,
        disk: DiskTier,
        host: HostTier,
        pool: PoolTier | None,
        copier: Copier,
        *,
        max_queued: int,
        max_leaving: int,
        on_settled: Callable[[BlockKey], None],
        sources_settled: Callable[[], Awaitable[None]],
    ) -> None:
        """``on_settled(key)``: a block that was taken over is on disk now, or lost; its slot is free.
        ``sources_settled()`` waits for blocks on their way from the pool to host memory."""
        self.leaving: InTransit[Leaving] = InTransit()
        self._disk = disk
        self._host = host
        self._pool = pool
        self._copier = copier
        self._max_queued = max_queued
        self._max_leaving = max_leaving
        self._on_settled = on_settled
        self._sources_settled = sources_settled
        self._queue: dict[BlockKey, None] = {}
        self._batch_blocks = max(_MIN_BATCH_BLOCKS, _BATCH_NBYTES // host.layout.block_nbytes)
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._task: asyncio.Task[None] | None = None
        self._writes: set[asyncio.Task[None]] = set()
        self._coming: set[BlockKey] = set()  # what they write

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="disk-writer")

    async def close(self) -> None:
        """Let the writes under way end; what is queued behind it is not written."""
        if self._task is None:
            return
        for key in list(self._queue):
            self._drop(key, "closing")
        task, self._task = self._task, None
        await self._idle.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def flush(self) -> None:
        """Wait until nothing is queued or being written."""
        await self._idle.wait()

    def __len__(self) -> int:
        return len(self._queue)

    # ------------------------------------------------------------------ what comes in

    @property
    def takes_more(self) -> bool:
        """Whether ``take_over`` would take a block."""
        return (
            len(self.leaving) < self._max_leaving
            and len(self._queue) < self._max_queued
            and not self._disk.is_stalled
        )

    def offer(self, key: BlockKey) -> bool:
        """Write this block of host memory or the pool, which keep it. False, counted: the queue is full."""
        if key in self._queue:
            return True
        if len(self._queue) >= self._max_queued or self._disk.is_stalled:
            metrics.DROPPED_WRITES.labels("stalled" if self._disk.is_stalled else "queue").inc()
            return False
        self._enqueue(key)
        return True

    def take_over(self, key: BlockKey, parent: BlockKey | None, slot: int) -> None:
        """Write a block that host memory evicts at this moment; its slot stays until then."""
        self._host.pin((slot,))
        self.leaving.add(key, Leaving(parent, slot))
        self._enqueue(key)

    def give_up(self, key: BlockKey) -> list[BlockKey]:
        """A block is in no tier any more: forget what was leaving after it. Returns those."""
        gone = self.leaving.after(key)
        for name in gone:
            metrics.DROPPED_WRITES.labels("orphaned").inc()
            self.forget(name)
        return gone

    def forget(self, key: BlockKey) -> None:
        """The block is removed: do not write it. One that is being written at this moment is."""
        self._queue.pop(key, None)
        leaving = self.leaving.pop(key)
        if leaving is not None:
            self._host.release((leaving.slot,))

    def _enqueue(self, key: BlockKey) -> None:
        self._queue[key] = None
        self._idle.clear()
        self._wake.set()

    # ------------------------------------------------------------------ what goes out

    async def _run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            await self._sources_settled()
            while len(self._writes) < _MAX_BATCHES and (batch := self._next_batch()) is not None:
                self._coming.update(batch)
                write = asyncio.create_task(self._write(batch), name="disk-write")
                self._writes.add(write)
                write.add_done_callback(self._write_ended)
            if not self._queue and not self._writes:
                self._idle.set()

    def _next_batch(self) -> WriteBatch | None:
        """The blocks queued for longest, up to a batch, or one run of a chain; None: nothing can begin."""
        batch = WriteBatch(self._disk, self._host, self._pool, self._copier, self._find, self._coming)
        for key in list(self._queue):
            if len(batch) >= self._batch_blocks:
                break
            if key in self._coming:
                continue  # when it is there, or is not
            del self._queue[key]
            if not batch.add(key):
                self._drop(key, "gone")
        return batch if batch.asked else None

    async def _write(self, batch: WriteBatch) -> None:
        try:
            await batch.write(self._batch_blocks)
        except MoonpoolError as error:
            _log.warning("blocks were not written to disk: %s", error)
            metrics.DROPPED_WRITES.labels("error").inc()
        except Exception:
            # Its blocks are settled as not written. Serving goes on without the disk rather than end.
            _log.exception("blocks were not written to disk")
            metrics.DROPPED_WRITES.labels("error").inc()
        finally:
            batch.release()
            self._coming.difference_update(batch)
            # What went along too: it may have been removed meanwhile, and is on disk again.
            for key in dict.fromkeys([*batch.asked, *batch]):
                self._settle(key)

    def _write_ended(self, write: asyncio.Task[None]) -> None:
        self._writes.discard(write)
        self._wake.set()

    def _find(self, key: BlockKey) -> Source | None:
        """Where the block is read from; None: it is nowhere."""
        host = self._host
        leaving = self.leaving.get(key)
        slot = host.slot_of(key) if leaving is None else leaving.slot
        if slot is not None:
            parent = host.parent_of(key) if leaving is None else leaving.parent
            return Source(key, parent, host.bytes_of(slot), host.checksum_of(slot), slot)
        block = None if self._pool is None else self._pool.block_of(key)
        if self._pool is None or block is None:
            return None
        pool = self._pool
        bytes_ = pool.bytes_of(block) if pool.in_main_memory else None
        return Source(key, pool.parent_of(key), bytes_, pool.known_checksum(block), block=block)

    def _settle(self, key: BlockKey) -> None:
        leaving = self.leaving.pop(key)
        if leaving is not None:
            self._host.release((leaving.slot,))
        self._on_settled(key)

    def _drop(self, key: BlockKey, reason: str) -> None:
        metrics.DROPPED_WRITES.labels(reason).inc()
        self._queue.pop(key, None)
        self._settle(key)

    def check_integrity(self) -> None:
        assert self.leaving.keys() <= self._queue.keys() or not self._idle.is_set(), (
            "a leaving block waits for nobody"
        )
