"""Blocks on their way to disk: a bounded queue, and the one task that empties it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from kvstore.host_tier import HostTier
from kvstore.keys import BlockKey
from kvstore.store import metrics
from kvstore.store.tiers import Bytes, DiskTier, PoolTier

_log = logging.getLogger(__name__)

# Of one durable write: its sync and commit cost as much as a MiB or two.
_BATCH_NBYTES = 8 << 20
_MIN_BATCH_BLOCKS = 16


@dataclass(frozen=True, slots=True)
class _Leaving:
    parent: BlockKey | None
    slot: int


@dataclass(frozen=True, slots=True)
class _Source:
    key: BlockKey
    parent: BlockKey | None
    bytes: Bytes
    checksum: int


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
        *,
        max_queued: int,
        max_leaving: int,
        on_settled: Callable[[BlockKey], None],
    ) -> None:
        """``on_settled(key)``: a block that was taken over is on disk now, or lost; its slot is free."""
        self.leaving: dict[BlockKey, _Leaving] = {}
        self._disk = disk
        self._host = host
        self._pool = pool
        self._max_queued = max_queued
        self._max_leaving = max_leaving
        self._on_settled = on_settled
        self._queue: dict[BlockKey, None] = {}
        self._batch_blocks = max(_MIN_BATCH_BLOCKS, _BATCH_NBYTES // host.layout.block_nbytes)
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="disk-writer")

    async def close(self) -> None:
        """Let the write under way end; what is queued behind it is not written."""
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
        self.leaving[key] = _Leaving(parent, slot)
        self._enqueue(key)

    def give_up(self, key: BlockKey) -> list[BlockKey]:
        """A block is in no tier any more: forget what was leaving after it. Returns those."""
        gone = [name for name, leaving in self.leaving.items() if leaving.parent == key]
        for name in gone:
            self._queue.pop(name, None)
            metrics.DROPPED_WRITES.labels("orphaned").inc()
            self._host.release((self.leaving.pop(name).slot,))
        return gone

    def forget(self, key: BlockKey) -> None:
        """The block is removed: do not write it. One that is being written at this moment is."""
        self._queue.pop(key, None)
        leaving = self.leaving.pop(key, None)
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
            while self._queue:
                try:
                    await self._write_batch()
                except Exception:
                    # Its blocks are settled as not written. Serving goes on without the disk rather than end.
                    _log.exception("blocks were not written to disk")
                    metrics.DROPPED_WRITES.labels("error").inc()
            self._idle.set()

    async def _write_batch(self) -> None:
        """Write the oldest queued blocks with what they need before them, up to a batch, or one such run."""
        batch: dict[BlockKey, _Source] = {}
        asked: list[BlockKey] = []
        slots: list[int] = []
        held: list[list[int]] = []
        while self._queue and len(batch) < self._batch_blocks:
            key = next(iter(self._queue))
            del self._queue[key]
            run = self._run_up_to(key, batch)
            if run is None:
                self._drop(key, "gone")
                continue
            asked.append(key)
            batch.update((source.key, source) for source, _ in run)
            run_slots = [slot for _, slot in run if slot is not None]
            self._host.pin(run_slots)
            slots += run_slots
            in_pool = [source.key for source, slot in run if slot is None]
            if self._pool is not None and in_pool:
                lineage = self._pool.lineage(in_pool[-1])
                self._pool.acquire(lineage)
                held.append(lineage)
        try:
            sources = list(batch.values())
            for first in range(0, len(sources), self._batch_blocks):
                if not await self._write(sources[first : first + self._batch_blocks]):
                    break
        finally:
            self._host.release(slots)
            for lineage in held:
                assert self._pool is not None
                self._pool.release(lineage)
            # What went along too: it may have been removed meanwhile, and is on disk again.
            for key in dict.fromkeys([*asked, *batch]):
                self._settle(key)

    async def _write(self, sources: list[_Source]) -> bool:
        began_s = time.monotonic()
        kept = await self._disk.put(
            [source.key for source in sources],
            [source.bytes.data for source in sources],
            parents=[source.parent for source in sources],
            checksums=[source.checksum for source in sources],
        )
        metrics.SECONDS.labels("ssd", "store").observe(time.monotonic() - began_s)
        metrics.WRITTEN_BLOCKS.inc(sum(kept))
        if not all(kept):
            metrics.DROPPED_WRITES.labels("disk").inc(len(kept) - sum(kept))
        return all(kept)

    def _run_up_to(
        self, key: BlockKey, batch: dict[BlockKey, _Source]
    ) -> list[tuple[_Source, int | None]] | None:
        """The block and those before it that are neither on disk nor in the batch, the first one first; each
        with its slot, None where the pool has it. None when one of them is nowhere."""
        run: list[tuple[_Source, int | None]] = []
        here: BlockKey | None = key
        while here is not None and here not in self._disk and here not in batch:
            found = self._find(here)
            if found is None:
                return None
            run.append(found)
            here = found[0].parent
        run.reverse()
        return run

    def _find(self, key: BlockKey) -> tuple[_Source, int | None] | None:
        host = self._host
        leaving = self.leaving.get(key)
        slot = host.slot_of(key) if leaving is None else leaving.slot
        if slot is not None:
            parent = host.parent_of(key) if leaving is None else leaving.parent
            return _Source(key, parent, host.bytes_of(slot), host.checksum_of(slot)), slot
        block = None if self._pool is None else self._pool.block_of(key)
        if self._pool is None or block is None:
            return None
        pool = self._pool
        return _Source(key, pool.parent_of(key), pool.bytes_of(block), pool.checksum(block)), None

    def _settle(self, key: BlockKey) -> None:
        leaving = self.leaving.pop(key, None)
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
