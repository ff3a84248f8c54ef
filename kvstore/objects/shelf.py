"""The objects of a store node: puts, reads and removal."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from random import Random

from moonpool.kvstore.objects import metrics
from moonpool.kvstore.objects.catalog import Catalogue
from moonpool.kvstore.objects.errors import BadRequest, OverQuota, PutBroken, PutUnknown, StoreFull
from moonpool.kvstore.objects.owner_quota import ObjectQuotas
from moonpool.kvstore.objects.put import Put
from moonpool.kvstore.objects.read_leases import ObjectLeases
from moonpool.kvstore.objects.table import ObjectTable
from moonpool.kvstore.store import TieredStore
from moonpool.protos import store_pb2

log = logging.getLogger(__name__)

# A surplus copy not read for this long may be dropped.
_UNUSED_S = 10.0
# Longest that closing waits for the disk.
_FLUSH_S = 60.0


class ObjectShelf:
    """Objects over a ``TieredStore`` of chunks, on one event loop. An object is visible in ``table`` once its
    last chunk is committed. Every call that names one names its owner."""

    def __init__(
        self,
        node_id: str,
        store: TieredStore,
        chunk_nbytes: int,
        *,
        catalogue: Catalogue | None,
        tenant_nbytes: int = 0,
        clock: Callable[[], float],
        rng: Random,
    ) -> None:
        """``store``: not started; its ``on_change`` calls ``table.chunk_changed``. ``tenant_nbytes``: limit
        of one owner's objects; 0: none. ``rng``: makes the ids of puts, which must not be guessed."""
        self.chunk_nbytes = chunk_nbytes
        self._quotas = ObjectQuotas(tenant_nbytes)
        self.table = ObjectTable(store, chunk_nbytes, catalogue, self._quotas)
        self.leases = ObjectLeases(store, self.table, clock=clock)
        self._node_id = node_id
        self._store = store
        self._rng = rng
        self._puts: dict[int, Put] = {}

    @property
    def num_users(self) -> int:
        return len(self._store.grants) + sum(put.grant is None for put in self._puts.values())

    async def start(self) -> None:
        await self._store.start()
        await self.table.adopt()

    async def close(self) -> None:
        """Abort puts, and write to disk what is only in memory."""
        for put_id in list(self._puts):
            self.abort(put_id)
        await self.table.settle()
        await self._store.flush(_FLUSH_S)
        await self._store.close()
        await self.table.close()

    def sweep(self) -> None:
        """End puts and leases that have expired. Call it regularly."""
        self._store.sweep()

    async def begin(self, owner: bytes, info: store_pb2.ObjectInfo, ttl_s: float | None) -> tuple[int, Put]:
        """Reserve the first chunks; returns the put and its id. ``ttl_s``: of the grant of each window; None:
        this process itself fills them, and the put does not lapse.

        The id is 0 if there is nothing to write: the object is empty, or this or a later version is here. An
        owner over its quota loses its least recently used objects.

        Raises ``StoreFull``, ``OverQuota``, ``BadRequest``; nothing is reserved then.
        """
        record = store_pb2.StoredObject(info=info, owner=owner, chunk_nbytes=self.chunk_nbytes)
        put = Put(self._store, record)
        if self._superseded(record):
            return 0, put
        if info.nbytes == 0:
            self._finish(put)
            return 0, put
        capacity = max(tier.capacity_blocks for tier in self._store.stats.tiers)
        if self.table.cut(record).num_chunks > capacity:
            # Otherwise it would evict everything else before it turned out not to fit.
            raise StoreFull(self._node_id, info.nbytes, capacity * self.chunk_nbytes)
        await self._keep_quota(record)
        try:
            await self._reserve(put)
        except BaseException:
            put.abort()
            raise
        if ttl_s is None:
            put_id = self._rng.getrandbits(63) | 1
        else:
            name = f"a put of {info.name!r}"
            put.grant = self._store.grants.grant(
                name, put.slots, ttl_s, lambda lapsed: self._grant_ended(put_id, lapsed)
            )
            put_id = put.grant.id
        self._puts[put_id] = put
        return put_id, put

    async def commit(self, put_id: int, checksums: Sequence[int]) -> Put:
        """The reserved chunks are written. Reserves the next ones, or shows the object when it is complete.

        Raises ``PutUnknown``, ``BadRequest``; ``StoreFull``, ``PutBroken``: nothing of the put is left.
        """
        put = self._put(put_id)
        if put.grant is not None:
            self._store.grants.renew(put_id, put.grant.granted_s)
        if put.writable is not None:
            # Nothing changes these bytes any more.
            await put.writable.end()
            put = self._put(put_id)
            put.writable = None
        put.commit(checksums)
        try:
            if not put.complete:
                await self._reserve(put)
                if self._puts.get(put_id) is not put:
                    self.table.discard(put.abort())  # it lapsed while it waited for room
                    raise PutUnknown(put_id)
                if put.grant is not None:
                    self._store.grants.change(put.grant, put.slots)
                return put
            if not self.table.is_whole(put.record):
                raise PutBroken(
                    f"the {put.record.info.nbytes} bytes were evicted before the last of them was written: "
                    "put less at a time, or raise store_node.object_nbytes"
                )
            del self._puts[put_id]
            self._store.grants.release(put_id)
            self._finish(put)
        except BaseException:
            self.abort(put_id)
            raise
        return put

    def abort(self, put_id: int) -> None:
        """Take a put back. An unknown one is no error."""
        put = self._puts.pop(put_id, None)
        if put is not None:
            self._store.grants.release(put_id)
            self.table.discard(put.abort())

    def _grant_ended(self, put_id: int, lapsed: bool) -> None:
        if lapsed:
            log.warning("a put of %r was not continued in time", self._puts[put_id].record.info.name)
            metrics.PUTS.labels("expired").inc()
            self.abort(put_id)

    def _put(self, put_id: int) -> Put:
        put = self._puts.get(put_id)
        if put is None:
            raise PutUnknown(put_id)
        return put

    async def _reserve(self, put: Put) -> None:
        await self._store.room()
        await self._drop_surplus(self.table.cut(put.record).num_chunks)
        if not put.reserve():
            capacity = self._store.host.capacity
            raise StoreFull(self._node_id, put.record.info.nbytes, capacity * self.chunk_nbytes)

    async def _keep_quota(self, record: store_pb2.StoredObject) -> None:
        owner, wanted_nbytes = record.owner, self.table.taken_nbytes(record)
        under_way = [put.record for put in self._puts.values() if put.record.owner == owner]
        victims = self._quotas.victims(
            owner, record.info.key, wanted_nbytes, sum(map(self.table.taken_nbytes, under_way))
        )
        if victims and record.info.surplus:
            # A surplus copy is not worth other objects.
            raise OverQuota(self._quotas.nbytes(owner) + wanted_nbytes, self._quotas.limit_nbytes)
        metrics.EVICTED_OBJECTS.labels("quota").inc(len(victims))
        await self.remove(owner, victims)

    async def _drop_surplus(self, num_wanted: int) -> None:
        """If room is needed, drop unused surplus copies before anything is evicted."""
        short = num_wanted - self._store.host.num_free
        if short <= 0:
            return
        for record in self.leases.unused_surplus(_UNUSED_S):
            if short <= 0:
                break
            metrics.EVICTED_OBJECTS.labels("surplus").inc()
            self.table.drop(record)
            short -= self.table.cut(record).num_chunks
        await self.table.settle()

    def _finish(self, put: Put) -> None:
        if self._superseded(put.record):
            self.table.discard(put.abort())  # a later version was put meanwhile
            return
        self.table.show(put.record)
        self.leases.touch(put.record)
        metrics.PUTS.labels("done").inc()

    def _superseded(self, record: store_pb2.StoredObject) -> bool:
        """Whether this version or a later one is here. Raises ``BadRequest``: another owner has the key."""
        held = self.table.get(record.info.key)
        if held is None:
            return False
        if held.owner != record.owner:
            raise BadRequest("the object's key is not its owner's")
        return held.info.version >= record.info.version

    async def remove(self, owner: bytes, keys: Iterable[bytes], before_version: int = 0) -> int:
        """Drop the owner's objects among ``keys`` (versions before ``before_version``; 0: any). Returns how
        many. Current readers are not affected."""
        num_removed = 0
        for key in keys:
            record = self.table.find(owner, key)
            if record is not None and (not before_version or record.info.version < before_version):
                self.table.drop(record)
                num_removed += 1
        if num_removed:
            # Removed objects must not return after a crash.
            await self.table.settle()
        return num_removed

    def check_integrity(self) -> None:
        """Assert every invariant; only while no put is running."""
        self._store.check_integrity()
        self.table.check_integrity(nothing_else=not self._puts)
