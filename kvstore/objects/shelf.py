"""The bytes of objects on a store node: puts, reads, and room for them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from random import Random

from moonpool.kvstore.objects import metrics
from moonpool.kvstore.objects.catalog import Catalogue
from moonpool.kvstore.objects.chunks import SMALL_NBYTES, folded, is_small
from moonpool.kvstore.objects.errors import BadRequest, OverQuota, PinsFull, PutBroken, PutUnknown, StoreFull
from moonpool.kvstore.objects.inventory import Inventory
from moonpool.kvstore.objects.owner_quota import ObjectQuotas
from moonpool.kvstore.objects.put import Put, window_chunks
from moonpool.kvstore.objects.read_leases import ObjectLeases
from moonpool.kvstore.store import TieredStore
from moonpool.protos import store_pb2
from moonpool.transfer import checksum

log = logging.getLogger(__name__)

# A surplus copy not read for this long may be dropped.
_UNUSED_S = 10.0
# Small objects take at most this part of the memory for objects, beside it.
_SMALL_PART = 8
# Longest that closing waits for the disk.
_FLUSH_S = 60.0


class ObjectShelf:
    """Objects over a ``TieredStore`` of chunks, on one event loop. An object is in ``inventory`` once its
    last chunk is committed; what a name means is in the records. Every call that names one names its owner.
    """

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
        """``store``: not started; its ``on_change`` calls ``inventory.chunk_changed``. ``tenant_nbytes``:
        limit of one owner's objects; 0: none. ``rng``: makes the ids of puts, which must not be guessed."""
        self.chunk_nbytes = chunk_nbytes
        self.window_chunks = window_chunks(store)
        self._quotas = ObjectQuotas(tenant_nbytes)
        self.inventory = Inventory(store, chunk_nbytes, catalogue, self._quotas)
        self.leases = ObjectLeases(store, self.inventory, clock=clock)
        self._node_id = node_id
        self._store = store
        self._clock = clock
        self._rng = rng
        self._puts: dict[int, Put] = {}
        self._beginning: set[Put] = set()  # room is being made for them; they count as those in ``_puts``
        self._added_s: dict[int, float] = {}  # when objects came that no record names yet
        self._small_capacity = store.host.capacity * chunk_nbytes // _SMALL_PART

    @property
    def num_users(self) -> int:
        return len(self._store.grants) + sum(put.grant is None for put in self._puts.values())

    async def start(self) -> None:
        await self._store.start()
        await self.inventory.adopt()

    async def close(self) -> None:
        """Abort puts, and write to disk what is only in memory."""
        for put_id in list(self._puts):
            self.abort(put_id)
        await self.inventory.settle()
        await self._store.flush(_FLUSH_S)
        await self._store.close()
        await self.inventory.close()

    def sweep(self) -> None:
        """End puts and leases that have expired. Call it regularly."""
        self._added_s = {
            each: at_s for each, at_s in self._added_s.items() if self.inventory.get(each) is not None
        }
        self._store.sweep()

    async def begin(
        self, owner: bytes, info: store_pb2.ObjectInfo, ttl_s: float | None, data: bytes = b""
    ) -> tuple[int, Put]:
        """Reserve the first chunks; returns the put and its id. ``ttl_s``: of the grant of each window; None:
        this process itself fills them, and the put does not lapse.

        The id is 0 if there is nothing to write: the object is small and here, with its ``data``, or it was
        here before. An owner over its quota loses its least recently used objects.

        Raises ``StoreFull``, ``OverQuota``, ``BadRequest``; ``PutBroken``: another put of the same storage id
        is running. Nothing is reserved then.
        """
        record = store_pb2.StoredObject(info=info, owner=owner, chunk_nbytes=self.chunk_nbytes)
        record.info.checksum = 0
        put = Put(self._store, record)
        if self._is_here(record):
            return 0, put
        if any(each.record.info.storage == info.storage for each in self._under_way):
            # They have the same chunks: the end of one would remove those of the other.
            raise PutBroken("another put of this version is running")
        self._beginning.add(put)
        try:
            if is_small(info):
                await self._add_small(put, data)
                return 0, put
            if self._store.disk is not None:
                self._check_fits(put, self._store.disk.nominal_capacity)
                # Where its filesystem is full it would evict chunks, also pinned ones, to write these.
                wanted_nbytes = self._quotas.chunks_nbytes + self._under_way_nbytes
                await self._store.disk.provide(wanted_nbytes // self.chunk_nbytes)
            self._check_fits(put)
            self._check_room(put)
            await self._keep_quota(put)
            await self._make_room(put)
            await self.inventory.removed(info.storage)
            await self._store.room()
            self._reserve(put)
        except BaseException:
            put.abort()
            raise
        finally:
            self._beginning.remove(put)
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
        put.record.info.checksum = folded(put.record.info.checksum, checksums)
        if put.grant is not None:
            self._store.grants.change(put.grant, ())
        try:
            if not put.complete:
                await self._store.room()
                self._put(put_id)  # it may have lapsed meanwhile
                self._reserve(put)
                if put.grant is not None:
                    self._store.grants.change(put.grant, put.slots)
                return put
            if not self.inventory.is_whole(put.record):
                raise PutBroken(
                    f"the {put.record.info.nbytes} bytes were evicted before the last of them was written: "
                    "put less at a time, or raise store_node.object_nbytes"
                )
            del self._puts[put_id]
            self._store.grants.release(put_id)
            self._add(put.record)
        except BaseException:
            self.abort(put_id)
            raise
        return put

    def abort(self, put_id: int) -> None:
        """Take a put back. An unknown one is no error."""
        put = self._puts.pop(put_id, None)
        if put is not None:
            self._store.grants.release(put_id)
            self.inventory.discard(put.abort())

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

    async def _add_small(self, put: Put, data: bytes) -> None:
        record = put.record
        if len(data) != record.info.nbytes:
            raise BadRequest(
                f"objects of at most {SMALL_NBYTES} bytes are sent with the call: {record.info.nbytes} bytes "
                f"are announced, {len(data)} were sent"
            )
        await self._keep_quota(put)
        excess = self._quotas.small_nbytes + len(data) - self._small_capacity
        if excess > 0:
            droppable = self._quotas.for_room(excess, small=True)
            if excess > sum(map(self.inventory.taken_nbytes, droppable)):
                raise StoreFull(self._node_id, len(data), self._small_capacity)
            self._drop(droppable, "room")
            await self.inventory.settle()
        if self._quotas.small_nbytes + len(data) > self._small_capacity:
            raise StoreFull(self._node_id, len(data), self._small_capacity)
        record.data, record.tail_checksum = data, checksum(data)
        record.info.checksum = folded(0, [record.tail_checksum])
        self._add(record)

    def _add(self, record: store_pb2.StoredObject) -> None:
        if self._is_here(record):
            return
        self.inventory.add(record)
        self._added_s[record.info.storage] = self._clock()
        self.leases.touch(record)
        metrics.PUTS.labels("done").inc()

    @property
    def _under_way(self) -> set[Put]:
        return {*self._puts.values(), *self._beginning}

    @property
    def _under_way_nbytes(self) -> int:
        """What the chunks of the puts under way will take."""
        under_way = [each.record for each in self._under_way if not is_small(each.record.info)]
        return sum(map(self.inventory.taken_nbytes, under_way))

    def _check_fits(self, put: Put, num_chunks: int = 0) -> None:
        """Otherwise it would evict everything else before it turned out not to fit. ``num_chunks``: that may
        be room for."""
        capacity_nbytes = max(self.capacity_nbytes, num_chunks * self.chunk_nbytes)
        if self.inventory.taken_nbytes(put.record) > capacity_nbytes:
            raise StoreFull(self._node_id, put.record.info.nbytes, capacity_nbytes)

    def _excess_nbytes(self) -> int:
        return self._quotas.chunks_nbytes + self._under_way_nbytes - self.capacity_nbytes

    def _check_room(self, put: Put) -> None:
        """Otherwise it would drop what may be dropped, and that would not be enough."""
        excess_nbytes = self._excess_nbytes()
        droppable = self._quotas.for_room(excess_nbytes, small=False)
        if excess_nbytes > sum(map(self.inventory.taken_nbytes, droppable)):
            raise StoreFull(self._node_id, put.record.info.nbytes, self.capacity_nbytes)

    async def _make_room(self, put: Put) -> None:
        """Drop whole objects, so that no tier has to choose a chunk to evict; none where it is not enough."""
        if self._excess_nbytes() <= 0:
            return
        self._check_room(put)
        for surplus in self.leases.unused_surplus(_UNUSED_S):
            if self._excess_nbytes() <= 0:
                break
            self._drop([surplus], "surplus")
        self._drop(self._quotas.for_room(self._excess_nbytes(), small=False), "room")
        # Puts that begin meanwhile count this one.
        await self.inventory.settle()

    def _drop(self, records: Sequence[store_pb2.StoredObject], reason: str) -> None:
        """Returns at once; see ``Inventory.settle``."""
        for record in records:
            metrics.EVICTED_OBJECTS.labels(reason).inc()
            self.inventory.lose(record, evicted=True)

    def _reserve(self, put: Put) -> None:
        """After ``room`` of the store."""
        if not put.reserve():
            capacity = self._store.host.capacity
            raise StoreFull(self._node_id, put.record.info.nbytes, capacity * self.chunk_nbytes)

    async def _keep_quota(self, put: Put) -> None:
        record, owner = put.record, put.record.owner
        wanted_nbytes = self.inventory.taken_nbytes(record)
        under_way = [each.record for each in self._under_way - {put} if each.record.owner == owner]
        victims = self._quotas.victims(
            owner, record.info.key, wanted_nbytes, sum(map(self.inventory.taken_nbytes, under_way))
        )
        if victims and record.info.surplus:
            # A surplus copy is not worth other objects.
            raise OverQuota(self._quotas.nbytes(owner) + wanted_nbytes, self._quotas.limit_nbytes)
        if victims:
            self._drop(victims, "quota")
            await self.inventory.settle()

    def _is_here(self, record: store_pb2.StoredObject) -> bool:
        """Whether these bytes are here. Raises ``BadRequest``: another owner has the storage id."""
        held = self.inventory.get(record.info.storage)
        if held is not None and (held.owner, held.info.key) != (record.owner, record.info.key):
            raise BadRequest("the object's storage id is not its owner's")
        return held is not None

    def name(self, record: store_pb2.StoredObject, named: store_pb2.ObjectRecord) -> None:
        """The record in Redis, which names these bytes."""
        self._added_s.pop(record.info.storage, None)
        self.inventory.name(record, named)

    def check_pin(
        self,
        record: store_pb2.StoredObject,
        pin: store_pb2.Pin.ValueType,
        pinning: Iterable[store_pb2.StoredObject],
    ) -> None:
        """Raise ``PinsFull``: half of the node's room is pinned, and the rest is for what is not.
        ``pinning``: objects that are about to be pinned."""
        nbytes = sum(map(self.inventory.taken_nbytes, (record, *pinning)))
        if pin != store_pb2.NONE and self._quotas.pinned_nbytes + nbytes > self.capacity_nbytes // 2:
            raise PinsFull(self._node_id, record.info.nbytes, self.capacity_nbytes // 2)

    def age_s(self, record: store_pb2.StoredObject) -> float:
        """Time since an object came that no record names yet; infinite after a restart."""
        return self._clock() - self._added_s.get(record.info.storage, float("-inf"))

    @property
    def capacity_nbytes(self) -> int:
        """Room for objects in chunks, in memory or on disk."""
        return max(tier.capacity_blocks for tier in self._store.stats.tiers) * self.chunk_nbytes

    def check_integrity(self) -> None:
        """Assert every invariant; only while no put is running."""
        self._store.check_integrity()
        self.inventory.check_integrity(nothing_else=not self._puts)
