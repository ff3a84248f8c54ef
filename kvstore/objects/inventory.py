"""The inventory of a store node: the objects with bytes here, by storage id."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator

from moonpool.kvstore.blocks.keys import BlockKey
from moonpool.kvstore.blocks.tier import Tier
from moonpool.kvstore.objects import metrics
from moonpool.kvstore.objects.catalog import Catalogue
from moonpool.kvstore.objects.chunks import RUN_CHUNKS, ChainRun, ChunkPlan, is_small
from moonpool.kvstore.objects.owner_quota import ObjectQuotas
from moonpool.kvstore.store import TieredStore
from moonpool.protos import store_pb2
from moonpool.transfer import checksum

log = logging.getLogger(__name__)


class Inventory:
    """An object is here from ``add`` until ``drop``, or until a chunk of it is gone from every tier; then
    its other chunks are removed. The catalogue follows. Which of them a name means is in the records
    alone."""

    def __init__(
        self, store: TieredStore, chunk_nbytes: int, catalogue: Catalogue | None, quotas: ObjectQuotas
    ) -> None:
        """``store``'s ``on_change`` calls ``chunk_changed``. ``quotas`` follows the objects."""
        self._quotas = quotas
        self._store = store
        self._chunk_nbytes = chunk_nbytes
        self._catalogue = catalogue
        self._objects: dict[int, store_pb2.StoredObject] = {}  # by storage id
        self._of_key: dict[bytes, list[int]] = {}
        self._object_of: dict[BlockKey, int] = {}  # by chunk
        self._runs: dict[int, list[ChainRun]] = {}  # of each object; cached, because making keys is slow
        self._pinned: dict[int, list[int]] = {}  # slots of objects that are never evicted
        self._removals: dict[asyncio.Task[None], int] = {}  # of chunks of this storage id
        # Called with an object that was dropped although a record may name it, and whether it was evicted
        # (else it was damaged).
        self.on_lost: Callable[[store_pb2.StoredObject, bool], None] = lambda record, evicted: None

    def __len__(self) -> int:
        return len(self._objects)

    def __iter__(self) -> Iterator[store_pb2.StoredObject]:
        return iter(self._objects.values())

    def get(self, storage: int) -> store_pb2.StoredObject | None:
        return self._objects.get(storage)

    def find(self, owner: bytes, storage: int) -> store_pb2.StoredObject | None:
        """The owner's object. Neither pins nor counts as a use."""
        record = self._objects.get(storage)
        return record if record is not None and record.owner == owner else None

    def of_key(self, owner: bytes, key: bytes) -> list[store_pb2.StoredObject]:
        """All that was put under a key and is still here."""
        found = [self._objects[storage] for storage in self._of_key.get(key, ())]
        return [record for record in found if record.owner == owner]

    def cut(self, record: store_pb2.StoredObject) -> ChunkPlan:
        return ChunkPlan.of(record.info, self._chunk_nbytes)

    def taken_nbytes(self, record: store_pb2.StoredObject) -> int:
        """Bytes it takes in memory: whole chunks, or its own if it is small."""
        if is_small(record.info):
            return record.info.nbytes
        return self.cut(record).num_chunks * self._chunk_nbytes

    def run_of(self, record: store_pb2.StoredObject, chunk: int) -> ChainRun:
        return self._runs[record.info.storage][chunk // RUN_CHUNKS]

    def is_whole(self, record: store_pb2.StoredObject) -> bool:
        if is_small(record.info):
            return checksum(record.data) == record.tail_checksum
        runs = self.cut(record).runs()
        return all(len(self._store.match(run.keys)) == len(run.keys) for run in runs)

    async def adopt(self) -> None:
        """Load the catalogue's objects of which the disk has every chunk. Other chunks are dropped."""
        if self._catalogue is None:
            return
        for key, record in self._catalogue.objects.items():
            fits = is_small(record.info) or record.chunk_nbytes == self._chunk_nbytes
            if record.info.storage and fits and self.is_whole(record):
                self._index(record)
            else:
                self._catalogue.forget(key)
        orphans = [key for key, _ in self._store.blocks() if key not in self._object_of]
        await self._store.remove(orphans)
        log.info(
            "%d of %d objects were loaded; %d chunks of no object were dropped",
            len(self._objects),
            len(self._catalogue.objects),
            len(orphans),
        )

    def add(self, record: store_pb2.StoredObject) -> None:
        """An object is complete. No record names it yet."""
        self._index(record)
        self._remember(record)

    def name(self, record: store_pb2.StoredObject, named: store_pb2.ObjectRecord) -> None:
        """The record in Redis, which names these bytes."""
        known = record.record
        if known.version == named.version and (known.places, known.copies) == (named.places, named.copies):
            return
        record.record.CopyFrom(named)
        record.record.ClearField("info")
        self._quotas.pinned(record)
        self._hold(record)
        self._remember(record)

    def _remember(self, record: store_pb2.StoredObject) -> None:
        if self._catalogue is not None:
            self._catalogue.remember(record)

    def _hold(self, record: store_pb2.StoredObject) -> None:
        """Keep the slots of an object that must not be evicted. What is on disk is not kept in memory."""
        storage, disk = record.info.storage, self._store.disk
        if record.record.pin == store_pb2.HARD and disk is None and storage not in self._pinned:
            slots = [self._store.host.slot_of(chunk) for run in self._runs[storage] for chunk in run.keys]
            self._pinned[storage] = [slot for slot in slots if slot is not None]
            self._store.host.pin(self._pinned[storage])

    def drop(self, record: store_pb2.StoredObject) -> None:
        """Drop an object's bytes. Current readers are not affected."""
        self._forget(record)
        if self._catalogue is not None:
            self._catalogue.forget(Catalogue.key_of(record))

    def lose(self, record: store_pb2.StoredObject, *, evicted: bool = False) -> None:
        """``drop`` an object that a record may name: ``on_lost`` is told."""
        self.drop(record)
        self.on_lost(record, evicted)

    def used(self, record: store_pb2.StoredObject) -> None:
        self._quotas.used(record)

    def discard(self, cut: ChunkPlan) -> None:
        """Remove chunks of no object. Returns at once; see ``settle``."""

        async def discard() -> None:
            for run in cut.runs():
                await self._store.remove(run.keys)

        removal = asyncio.create_task(discard())
        self._removals[removal] = cut.storage
        removal.add_done_callback(self._removals.pop)

    async def removed(self, storage: int) -> None:
        """Wait until no former chunks of a storage id are being removed."""
        removals = [task for task, each in self._removals.items() if each == storage]
        if removals:
            await asyncio.wait(removals)

    def chunk_changed(self, key: BlockKey, tier: Tier | None) -> None:
        if tier is None and (storage := self._object_of.get(key)) is not None:
            # Called within a change of the store: drop the rest of the object after it.
            asyncio.get_running_loop().call_soon(self._lost, storage, key)

    async def settle(self) -> None:
        """Wait until dropped objects are gone from disk and catalogue."""
        if self._removals:
            # Others wait for them, too: they outlast a caller that is cancelled.
            await asyncio.shield(asyncio.gather(*self._removals))
        if self._catalogue is not None:
            await self._catalogue.flush()

    async def close(self) -> None:
        """After ``settle``; the owner closes the store."""
        if self._catalogue is not None:
            await self._catalogue.close()

    def _index(self, record: store_pb2.StoredObject) -> None:
        storage = record.info.storage
        self._objects[storage] = record
        self._of_key.setdefault(record.info.key, []).append(storage)
        self._quotas.shown(record, self.taken_nbytes(record))
        self._runs[storage] = [] if is_small(record.info) else list(self.cut(record).runs())
        for run in self._runs[storage]:
            for chunk in run.keys:
                self._object_of[chunk] = storage
        self._hold(record)

    def _forget(self, record: store_pb2.StoredObject) -> None:
        storage = record.info.storage
        del self._objects[storage]
        of_key = self._of_key[record.info.key]
        of_key.remove(storage)
        if not of_key:
            del self._of_key[record.info.key]
        self._quotas.gone(record)
        self._store.host.unpin(self._pinned.pop(storage, ()))
        runs = self._runs.pop(storage)
        for run in runs:
            for chunk in run.keys:
                del self._object_of[chunk]
        if runs:
            self.discard(self.cut(record))

    def _lost(self, storage: int, chunk: BlockKey) -> None:
        """A chunk is gone from every tier: evicted, or found damaged."""
        record = self._objects.get(storage)
        if record is not None and self._object_of.get(chunk) == storage and not self._store.match([chunk]):
            metrics.EVICTED_OBJECTS.labels("room").inc()
            self.lose(record, evicted=True)

    def check_integrity(self, *, nothing_else: bool) -> None:
        """Assert that every object is whole; with ``nothing_else`` the store holds no other chunk. Costs time
        proportional to the tier."""
        assert all(map(self.is_whole, self._objects.values())), "an object lacks chunks"
        if nothing_else and not self._removals:
            assert {key for key, _ in self._store.blocks()} <= self._object_of.keys(), "a chunk of no object"
