"""Objects that somebody reads: their chunks stay in memory until he says so, or his time is up."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from moonpool.kvstore.blocks.tier import Tier
from moonpool.kvstore.objects import metrics
from moonpool.kvstore.objects.chunks import ChainRun, ChunkPlan
from moonpool.kvstore.objects.put import window_chunks
from moonpool.kvstore.objects.table import ObjectTable
from moonpool.kvstore.objects.write_behind import WriteBehind
from moonpool.kvstore.store import TieredStore
from moonpool.protos import store_pb2

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Opened:
    """Chunks of an object, pinned: where each lies, and the checksum of its own bytes."""

    record: store_pb2.StoredObject
    offsets: list[int] = field(default_factory=list)  # into the store's memory
    checksums: list[int] = field(default_factory=list)
    lease_ids: list[int] = field(default_factory=list)


class ObjectLeases:
    """``sweep`` must be called now and then: a dead reader never releases."""

    def __init__(
        self,
        store: TieredStore,
        table: ObjectTable,
        behind: WriteBehind,
        *,
        longest_s: float,
        clock: Callable[[], float],
        rng: Random,
    ) -> None:
        """``rng`` makes the ids: who is not told one must not guess it, for it ends somebody's lease."""
        self._store = store
        self._table = table
        self._behind = behind
        self._window = window_chunks(store)
        self._longest_s = longest_s
        self._clock = clock
        self._rng = rng
        self._leases: dict[int, tuple[int, float]] = {}  # the store's lease, and when it ends
        self._read_s: dict[bytes, float] = {}  # when a surplus copy was last asked for

    def __len__(self) -> int:
        return len(self._leases)

    async def open(self, owner: bytes, wanted: store_pb2.OpenObject, ttl_s: float) -> Opened | None:
        """Pin chunks from ``wanted.first_chunk`` on, a window of them at most; those on disk come to memory.

        None: not here. An answer without chunks where some were wanted: there is no room to bring them to
        memory now.
        """
        record = self._table.find(owner, wanted.key)
        if record is None or wanted.version not in (0, record.info.version):
            metrics.LOOKUPS.labels("miss").inc()
            return None
        self.touch(record)
        self._table.used(record)
        opened, cut = Opened(record), self._table.cut(record)
        at, end = wanted.first_chunk, min(wanted.first_chunk + self._window, cut.num_chunks)
        try:
            while at < end and self._table.get(wanted.key) is record:
                run = self._table.run_of(record, at)
                num_pinned = await self._pin(opened, cut, run, at, ttl_s)
                if not num_pinned:
                    break
                at += num_pinned
        except BaseException:
            self._release_all(opened)
            raise
        if at < end and self._table.find(owner, wanted.key) is not record:
            self._release_all(opened)
            metrics.LOOKUPS.labels("miss").inc()
            return None  # a chunk turned out to be gone or damaged, and took the object along
        metrics.LOOKUPS.labels("hit").inc()
        return opened

    async def _pin(self, opened: Opened, cut: ChunkPlan, run: ChainRun, at: int, ttl_s: float) -> int:
        """Pin the run that chunk ``at`` is in; returns how many chunks from ``at`` on can be read."""
        self._store.use(run.keys)
        if Tier.SSD in self._store.match(run.keys):
            # They come to memory, and others have to leave it.
            await self._behind.room()
        lease = await self._store.pin(run.keys, min(ttl_s, self._longest_s))
        if lease.id:
            lease_id = self._rng.getrandbits(63) | 1
            self._leases[lease_id] = (lease.id, lease.expires_s)
            opened.lease_ids.append(lease_id)
        blocks = lease.blocks[at - run.first :]
        opened.offsets += [block.slot * cut.chunk_nbytes for block in blocks]
        opened.checksums += [block.checksum for block in blocks]
        if blocks and at + len(blocks) == cut.num_chunks:
            opened.checksums[-1] = opened.record.tail_checksum
        return len(blocks)

    def release(self, lease_id: int) -> None:
        """Let go. One that is not held is no error."""
        lease = self._leases.pop(lease_id, None)
        if lease is not None:
            self._store.release(lease[0])

    def _release_all(self, opened: Opened) -> None:
        for lease_id in opened.lease_ids:
            self.release(lease_id)

    def sweep(self) -> None:
        now_s = self._clock()
        for lease_id in [each for each, (_, ends_s) in self._leases.items() if ends_s <= now_s]:
            self.release(lease_id)

    def close(self) -> None:
        for lease_id in list(self._leases):
            self.release(lease_id)

    def touch(self, record: store_pb2.StoredObject) -> None:
        """It is read, or has just come."""
        if record.info.surplus:
            self._read_s[record.info.key] = self._clock()

    def unused_surplus(self, unused_s: float) -> list[store_pb2.StoredObject]:
        """Surplus copies that were not read for ``unused_s``, the one unread for longest first."""
        surplus = [record for record in self._table if record.info.surplus]
        kept = {record.info.key: self._read_s.get(record.info.key, 0.0) for record in surplus}
        self._read_s = {key: read_s for key, read_s in kept.items() if read_s}
        cold = [record for record in surplus if kept[record.info.key] <= self._clock() - unused_s]
        return sorted(cold, key=lambda record: kept[record.info.key])

    async def check(self, owner: bytes, key: bytes) -> bool:
        """Compare every chunk of the owner's object with its checksum. True: it was damaged, and is gone."""
        record = self._table.find(owner, key)
        if record is None:
            return False
        for run in self._table.cut(record).runs():
            lease = await self._store.pin(run.keys, self._longest_s)
            try:
                slots = [block.slot for block in lease.blocks]
                intact = await asyncio.to_thread(self._all_intact, slots)
            finally:
                self._store.release(lease.id)
            if not intact and self._table.get(key) is record:
                metrics.EVICTED_OBJECTS.labels("damaged").inc()
                log.error("object %r is damaged in memory and was dropped", record.info.name)
                self._table.drop(record)
                return True
        return False

    def _all_intact(self, slots: list[int]) -> bool:
        return all(map(self._store.host.is_intact, slots))
