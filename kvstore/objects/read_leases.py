"""Leases on objects: their chunks stay in memory until the reader releases them or the lease expires."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from moonpool.kvstore.blocks.tier import Tier
from moonpool.kvstore.objects import metrics
from moonpool.kvstore.objects.chunks import ChainRun, ChunkPlan, is_small
from moonpool.kvstore.objects.inventory import Inventory
from moonpool.kvstore.objects.put import window_chunks
from moonpool.kvstore.store import TieredStore
from moonpool.protos import store_pb2

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Opened:
    """Pinned chunks of an object: their offsets, and the checksums of their own bytes."""

    record: store_pb2.StoredObject
    offsets: list[int] = field(default_factory=list)  # into the store's memory
    checksums: list[int] = field(default_factory=list)
    lease_ids: list[int] = field(default_factory=list)
    granted_s: float = math.inf  # the leases end so long after the request, or later


class ObjectLeases:
    """Pin objects for readers. The leases are the store's own, so ``store.sweep`` ends those that expire."""

    def __init__(self, store: TieredStore, inventory: Inventory, *, clock: Callable[[], float]) -> None:
        self._store = store
        self._inventory = inventory
        self._window = window_chunks(store)
        self._clock = clock
        self._read_s: dict[int, float] = {}  # when a surplus copy was last read

    async def open(self, owner: bytes, wanted: store_pb2.OpenObject, ttl_s: float) -> Opened | None:
        """Pin a window of chunks from ``wanted.first_chunk`` on; those on disk are read into memory.

        None: the object is not here. No chunks although the object has some: there is no memory for them.
        """
        record = self._inventory.find(owner, wanted.storage)
        if record is None:
            metrics.LOOKUPS.labels("miss").inc()
            return None
        self.touch(record)
        self._inventory.used(record)
        opened, cut = Opened(record), self._inventory.cut(record)
        if is_small(record.info):
            metrics.LOOKUPS.labels("hit").inc()
            return opened
        at, end = wanted.first_chunk, min(wanted.first_chunk + self._window, cut.num_chunks)
        try:
            while at < end and self._inventory.get(wanted.storage) is record:
                run = self._inventory.run_of(record, at)
                num_pinned = await self._pin(opened, cut, run, at, ttl_s)
                if not num_pinned:
                    break
                at += num_pinned
        except BaseException:
            self.release(opened.lease_ids)
            raise
        if at < end and self._inventory.get(wanted.storage) is not record:
            self.release(opened.lease_ids)
            metrics.LOOKUPS.labels("miss").inc()
            return None  # a chunk was gone or damaged, so the object was dropped
        metrics.LOOKUPS.labels("hit").inc()
        return opened

    async def _pin(self, opened: Opened, cut: ChunkPlan, run: ChainRun, at: int, ttl_s: float) -> int:
        """Pin the run that contains chunk ``at``; returns how many chunks from ``at`` on can be read."""
        self._store.use(run.keys)
        if Tier.SSD in self._store.match(run.keys):
            # They are read into memory, from which others must be evicted.
            await self._store.room()
        name = f"a reader of {opened.record.info.name!r}"
        lease = await self._store.pin(run.keys, ttl_s, name)
        if lease.id:
            opened.lease_ids.append(lease.id)
            opened.granted_s = min(opened.granted_s, lease.granted_s)
        blocks = lease.blocks[at - run.first :]
        opened.offsets += [block.slot * cut.chunk_nbytes for block in blocks]
        opened.checksums += [block.checksum for block in blocks]
        if blocks and at + len(blocks) == cut.num_chunks:
            opened.checksums[-1] = opened.record.tail_checksum
        return len(blocks)

    def release(self, lease_ids: Iterable[int]) -> None:
        """End leases. Unknown ones are no error."""
        for lease_id in lease_ids:
            self._store.release(lease_id)

    def touch(self, record: store_pb2.StoredObject) -> None:
        if record.info.surplus:
            self._read_s[record.info.storage] = self._clock()

    def unused_surplus(self, unused_s: float) -> list[store_pb2.StoredObject]:
        """Surplus copies that were not read for ``unused_s``, the least recently read first."""
        surplus = [record for record in self._inventory if record.info.surplus]
        kept = {each.info.storage: self._read_s.get(each.info.storage, 0.0) for each in surplus}
        self._read_s = {key: read_s for key, read_s in kept.items() if read_s}
        cold = [record for record in surplus if kept[record.info.storage] <= self._clock() - unused_s]
        return sorted(cold, key=lambda record: kept[record.info.storage])

    async def check(self, owner: bytes, storage: int) -> bool:
        """Verify every byte of the owner's object. True: it was damaged, and has been dropped."""
        record = self._inventory.find(owner, storage)
        if record is None:
            return False
        if is_small(record.info):
            return self._drop_if(not self._inventory.is_whole(record), record)
        for run in self._inventory.cut(record).runs():
            async with self._store.pinned(run.keys) as pinned:
                slots = [block.slot for block in pinned]
                intact = await asyncio.to_thread(self._all_intact, slots)
            if self._drop_if(not intact, record):
                return True
        return False

    def _drop_if(self, damaged: bool, record: store_pb2.StoredObject) -> bool:
        if not damaged or self._inventory.get(record.info.storage) is not record:
            return False
        metrics.EVICTED_OBJECTS.labels("damaged").inc()
        log.error("object %r is damaged in memory and was dropped", record.info.name)
        self._inventory.lose(record)
        return True

    def _all_intact(self, slots: list[int]) -> bool:
        return all(map(self._store.host.is_intact, slots))
