"""The objects of a store node: who owns them, where their chunks are, and who reads or writes them now."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from random import Random

from kvstore.keys import BlockKey
from kvstore.store import TieredStore
from kvstore.store_node import metrics
from kvstore.store_node.catalogue import Catalogue
from kvstore.store_node.chunks import Cut
from kvstore.store_node.errors import PutUnknown, StoreFull
from kvstore.store_node.put import WINDOW_CHUNKS, Put
from kvstore.tier import Tier
from protos import store_pb2

log = logging.getLogger(__name__)

_FLUSH_S = 60.0  # a disk that takes longer is given up on until the next put


@dataclass(slots=True)
class Opened:
    """Chunks ``first_chunk …`` of an object, pinned: where each lies, and the checksum of its own bytes."""

    record: store_pb2.StoredObject
    offsets: list[int] = field(default_factory=list)  # into the shelf's memory
    checksums: list[int] = field(default_factory=list)
    lease_ids: list[int] = field(default_factory=list)


class ObjectShelf:
    """Objects over a ``TieredStore`` of chunks. Everything on one event loop.

    An object is visible from the moment its last chunk is committed until one of them is gone from every
    tier; then all of it goes. Whoever names an object must name its owner too.
    """

    def __init__(
        self,
        node_id: str,
        store: TieredStore,
        chunk_nbytes: int,
        *,
        catalogue: Catalogue | None,
        longest_lease_s: float,
        clock: Callable[[], float],
        rng: Random,
    ) -> None:
        """``store``: not started; its ``on_change`` must call ``chunk_changed``. ``rng``: makes the ids of
        leases and puts, which must not be guessed."""
        self.chunk_nbytes = chunk_nbytes
        self._node_id = node_id
        self._store = store
        self._catalogue = catalogue
        self._longest_lease_s = longest_lease_s
        self._clock = clock
        self._rng = rng
        self._objects: dict[bytes, store_pb2.StoredObject] = {}
        self._object_of: dict[BlockKey, bytes] = {}  # by chunk
        self._puts: dict[int, Put] = {}
        self._leases: dict[int, tuple[int, float]] = {}  # the store's lease, and when it ends
        self._removals: set[asyncio.Task[None]] = set()
        self._writing: asyncio.Task[None] | None = None
        self._num_unwritten = 0  # chunks committed since the writing began

    def __len__(self) -> int:
        return len(self._objects)

    @property
    def num_puts(self) -> int:
        return len(self._puts)

    @property
    def num_leases(self) -> int:
        return len(self._leases)

    # ------------------------------------------------------------------ life

    async def start(self) -> None:
        """Take up what the disk holds: objects of which every chunk is there. The rest is dropped."""
        await self._store.start()
        if self._catalogue is None:
            return
        for record in self._catalogue.objects.values():
            cut = Cut.of(record.info, self.chunk_nbytes)
            whole = record.chunk_nbytes == self.chunk_nbytes and all(
                len(self._store.match(part.keys)) == len(part.keys) for part in cut.parts()
            )
            if whole:
                self._show(record)
            else:
                self._catalogue.forget(record.info.key)
        found, known = len(self._objects), len(self._catalogue.objects)
        orphans = [key for key, _ in self._store.held() if key not in self._object_of]
        await self._store.remove(orphans)
        log.info(
            "%d of %d objects are back; %d chunks that belong to none were dropped",
            found,
            known,
            len(orphans),
        )

    async def close(self) -> None:
        for put_id in list(self._puts):
            self.abort(put_id)
        for lease_id in list(self._leases):
            self.close_lease(lease_id)
        await self._settle()
        await self._written()
        await self._store.close()
        if self._catalogue is not None:
            await self._catalogue.close()

    def sweep(self) -> None:
        """Take back puts and leases whose time is over. Call it now and then."""
        now_s = self._clock()
        for put_id in [each for each, put in self._puts.items() if put.expires_s <= now_s]:
            log.warning("a put of %r was not continued in time", self._puts[put_id].record.info.name)
            metrics.PUTS.labels("expired").inc()
            self.abort(put_id)
        for lease_id in [each for each, (_, ends_s) in self._leases.items() if ends_s <= now_s]:
            self.close_lease(lease_id)
        self._store.sweep()

    def chunk_changed(self, key: BlockKey, tier: Tier | None) -> None:
        """The store's ``on_change``."""
        if tier is None and (object_key := self._object_of.get(key)) is not None:
            # The store is in the middle of something: what is left of the object goes after that.
            asyncio.get_running_loop().call_soon(self._lost, object_key, key)

    # ------------------------------------------------------------------ what is here

    def find(self, owner: bytes, key: bytes) -> store_pb2.StoredObject | None:
        """The object, to its owner. Pins nothing and counts as no use."""
        record = self._objects.get(key)
        return record if record is not None and record.owner == owner else None

    def owned_by(self, owner: bytes) -> Iterator[store_pb2.StoredObject]:
        return (record for record in self._objects.values() if record.owner == owner)

    # ------------------------------------------------------------------ objects come

    async def begin(self, owner: bytes, info: store_pb2.ObjectInfo, ttl_s: float) -> tuple[int, Put]:
        """Reserve the first chunks; returns the put and its id.

        The id is 0 when there is nothing to write: the object is empty, or this version or a later one is
        here. Raises ``StoreFull``; nothing is reserved then.
        """
        record = store_pb2.StoredObject(info=info, owner=owner, chunk_nbytes=self.chunk_nbytes)
        put = Put(self._store, record, min(ttl_s, self._longest_lease_s))
        held = self._objects.get(info.key)
        if held is not None and held.owner == owner and held.info.version >= info.version:
            return 0, put
        if info.nbytes == 0:
            self._finish(put)
            return 0, put
        capacity = max(tier.capacity_blocks for tier in self._store.stats.tiers)
        if -(-info.nbytes // self.chunk_nbytes) > capacity:
            # Or it would drive everything else out before it turned out not to fit.
            raise StoreFull(self._node_id, info.nbytes, capacity * self.chunk_nbytes)
        await self._reserve(put)
        put_id = self._new_id()
        self._puts[put_id] = put
        return put_id, put

    async def commit(self, put_id: int, checksums: Sequence[int]) -> Put:
        """The reserved chunks are written. Reserves the next ones, or shows the object when it is complete.

        Raises ``PutUnknown``, ``BadRequest``, ``StoreFull``, ``PutBroken``; after the last two nothing of
        the put is left.
        """
        put = self._puts.get(put_id)
        if put is None:
            raise PutUnknown(put_id)
        put.commit(checksums)
        self._write_soon(len(checksums))
        try:
            if put.complete:
                put.check_held()
                del self._puts[put_id]
                self._finish(put)
            else:
                await self._reserve(put)
        except BaseException:
            self.abort(put_id)
            raise
        return put

    def abort(self, put_id: int) -> None:
        """Take a put back. One that is not under way is no error."""
        put = self._puts.pop(put_id, None)
        if put is not None:
            self._discard(put.abort())

    async def _reserve(self, put: Put) -> None:
        capacity = self._store.host.stats.num_blocks
        if self._num_unwritten > capacity // 2:
            # What is evicted before it is on disk is lost: let the disk catch up.
            await self._written()
        if not put.reserve():
            raise StoreFull(self._node_id, put.record.info.nbytes, capacity * self.chunk_nbytes)
        put.expires_s = self._clock() + put.ttl_s

    def _finish(self, put: Put) -> None:
        info = put.record.info
        held = self._objects.get(info.key)
        if held is not None and held.info.version >= info.version:
            self._discard(put.abort())  # a later version came while this one was written
            return
        if held is not None:
            self._drop(held)
        self._show(put.record)
        if self._catalogue is not None:
            self._catalogue.remember(put.record)
        metrics.PUTS.labels("done").inc()

    # ------------------------------------------------------------------ objects are read

    async def open(self, owner: bytes, wanted: store_pb2.OpenObject, ttl_s: float) -> Opened | None:
        """Pin chunks from ``wanted.first_chunk`` on, a window of them at most; SSD chunks come to memory.

        None: not here. An answer without chunks where some were wanted: there is no room to bring them to
        memory now.
        """
        record = self.find(owner, wanted.key)
        if record is None or wanted.version not in (0, record.info.version):
            metrics.LOOKUPS.labels("miss").inc()
            return None
        opened = Opened(record)
        cut = Cut.of(record.info, self.chunk_nbytes)
        at = wanted.first_chunk
        end = min(at + WINDOW_CHUNKS, cut.num_chunks)
        try:
            while at < end and (num_pinned := await self._pin(opened, cut, at, ttl_s)):
                at += num_pinned
        except BaseException:
            for lease_id in opened.lease_ids:
                self.close_lease(lease_id)
            raise
        if not opened.offsets and end > wanted.first_chunk and self.find(owner, wanted.key) is None:
            metrics.LOOKUPS.labels("miss").inc()
            return None  # a chunk turned out to be damaged, and took the object along
        metrics.LOOKUPS.labels("hit").inc()
        return opened

    async def _pin(self, opened: Opened, cut: Cut, at: int, ttl_s: float) -> int:
        """Pin the part that chunk ``at`` is in; returns how many chunks from ``at`` on can be read."""
        part = cut.part(at)
        self._store.use(part.keys)
        lease = await self._store.pin(part.keys, min(ttl_s, self._longest_lease_s))
        blocks = lease.blocks[at - part.first :]
        if lease.id:
            lease_id = self._new_id()
            self._leases[lease_id] = (lease.id, lease.expires_s)
            opened.lease_ids.append(lease_id)
        for number, block in enumerate(blocks, at):
            opened.offsets.append(block.slot * self.chunk_nbytes)
            last = number == cut.num_chunks - 1
            opened.checksums.append(opened.record.tail_checksum if last else block.checksum)
        return len(blocks)

    def close_lease(self, lease_id: int) -> None:
        """Let go. One that is not held is no error."""
        lease = self._leases.pop(lease_id, None)
        if lease is not None:
            self._store.release(lease[0])

    async def check(self, owner: bytes, key: bytes) -> bool:
        """Compare every chunk of the owner's object with its checksum. True: it was damaged, and is gone."""
        record = self.find(owner, key)
        if record is None:
            return False
        for part in Cut.of(record.info, self.chunk_nbytes).parts():
            lease = await self._store.pin(part.keys, self._longest_lease_s)
            try:
                slots = [block.slot for block in lease.blocks]
                intact = await asyncio.to_thread(lambda: all(map(self._store.host.is_intact, slots)))  # noqa: B023
            finally:
                self._store.release(lease.id)
            if not intact and self._objects.get(key) is record:
                log.error("object %r is damaged in memory and was dropped", record.info.name)
                self._drop(record)
                return True
        return False

    # ------------------------------------------------------------------ objects go

    async def remove(self, owner: bytes, keys: Iterable[bytes], before_version: int = 0) -> int:
        """Drop the owner's objects among ``keys`` (versions before ``before_version``; 0: any). Returns how
        many went. Those who read them now read them to the end."""
        num_removed = 0
        for key in keys:
            record = self.find(owner, key)
            if record is not None and (not before_version or record.info.version < before_version):
                self._drop(record)
                num_removed += 1
        if num_removed:
            # What was removed must not be back after a crash.
            await self._settle()
        return num_removed

    def _show(self, record: store_pb2.StoredObject) -> None:
        key = record.info.key
        self._objects[key] = record
        for part in Cut.of(record.info, self.chunk_nbytes).parts():
            for chunk in part.keys:
                self._object_of[chunk] = key

    def _drop(self, record: store_pb2.StoredObject) -> None:
        del self._objects[record.info.key]
        cut = Cut.of(record.info, self.chunk_nbytes)
        for part in cut.parts():
            for chunk in part.keys:
                self._object_of.pop(chunk, None)
        self._discard(cut)
        if self._catalogue is not None:
            self._catalogue.forget(record.info.key)

    def _discard(self, cut: Cut) -> None:
        """Drop the chunks of an object that nobody finds any more."""

        async def discard() -> None:
            for part in cut.parts():
                await self._store.remove(part.keys)

        removal = asyncio.create_task(discard())
        self._removals.add(removal)
        removal.add_done_callback(self._removals.discard)

    # ------------------------------------------------------------------ to disk

    def _write_soon(self, num_chunks: int) -> None:
        """Have what only memory holds written, however much it is: the store itself gives up what its queue
        has no room for."""
        if self._store.ssd is None:
            return
        self._num_unwritten += num_chunks
        if self._writing is None:
            self._writing = asyncio.create_task(self._write(), name="objects to disk")

    async def _write(self) -> None:
        try:
            while self._num_unwritten:
                self._num_unwritten = 0
                await self._store.flush(_FLUSH_S)
        finally:
            self._writing = None

    async def _written(self) -> None:
        if self._writing is not None:
            await asyncio.shield(self._writing)

    async def _settle(self) -> None:
        """Until all that was dropped is gone from the disk too."""
        if self._removals:
            await asyncio.gather(*self._removals)
        if self._catalogue is not None:
            await self._catalogue.flush()

    def _lost(self, key: bytes, chunk: BlockKey) -> None:
        """A chunk of a visible object is gone from every tier: it was evicted, or found damaged."""
        record = self._objects.get(key)
        if record is not None and self._object_of.get(chunk) == key and not self._store.match([chunk]):
            metrics.EVICTED_OBJECTS.inc()
            self._drop(record)

    # ------------------------------------------------------------------ plumbing

    def _new_id(self) -> int:
        return self._rng.getrandbits(63) | 1

    def check_integrity(self) -> None:
        """Every visible object is whole, and nothing else is kept. Costs time proportional to the tier."""
        self._store.check_integrity()
        for record in self._objects.values():
            for part in Cut.of(record.info, self.chunk_nbytes).parts():
                assert len(self._store.match(part.keys)) == len(part.keys), "an object lacks chunks"
        if not self._puts and not self._removals:
            assert {key for key, _ in self._store.held()} <= self._object_of.keys(), "a chunk of no object"
