"""The objects of a store node, their owners and their chunks."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator

from moonpool.kvstore.blocks.keys import BlockKey
from moonpool.kvstore.blocks.tier import Tier
from moonpool.kvstore.objects import metrics
from moonpool.kvstore.objects.catalog import Catalogue
from moonpool.kvstore.objects.chunks import RUN_CHUNKS, ChainRun, ChunkPlan
from moonpool.kvstore.objects.owner_quota import ObjectQuotas
from moonpool.kvstore.store import TieredStore
from moonpool.protos import store_pb2

log = logging.getLogger(__name__)


class ObjectTable:
    """An object is here from ``show`` until ``drop``, or until a chunk of it is gone from every tier; then
    its other chunks are removed. The catalogue follows."""

    def __init__(
        self, store: TieredStore, chunk_nbytes: int, catalogue: Catalogue | None, quotas: ObjectQuotas
    ) -> None:
        """``store``'s ``on_change`` calls ``chunk_changed``. ``quotas`` follows the objects."""
        self._quotas = quotas
        self._store = store
        self._chunk_nbytes = chunk_nbytes
        self._catalogue = catalogue
        self._objects: dict[bytes, store_pb2.StoredObject] = {}
        self._object_of: dict[BlockKey, bytes] = {}  # by chunk
        self._runs: dict[bytes, list[ChainRun]] = {}  # of each object; cached, because making keys is slow
        self._removals: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._objects)

    def __iter__(self) -> Iterator[store_pb2.StoredObject]:
        return iter(self._objects.values())

    def get(self, key: bytes) -> store_pb2.StoredObject | None:
        return self._objects.get(key)

    def find(self, owner: bytes, key: bytes) -> store_pb2.StoredObject | None:
        """The owner's object. Neither pins nor counts as a use."""
        record = self._objects.get(key)
        return record if record is not None and record.owner == owner else None

    def cut(self, record: store_pb2.StoredObject) -> ChunkPlan:
        return ChunkPlan.of(record.info, self._chunk_nbytes)

    def taken_nbytes(self, record: store_pb2.StoredObject) -> int:
        """Bytes it takes in the store: whole chunks."""
        return self.cut(record).num_chunks * self._chunk_nbytes

    def run_of(self, record: store_pb2.StoredObject, chunk: int) -> ChainRun:
        return self._runs[record.info.key][chunk // RUN_CHUNKS]

    def is_whole(self, record: store_pb2.StoredObject) -> bool:
        runs = self.cut(record).runs()
        return all(len(self._store.match(run.keys)) == len(run.keys) for run in runs)

    async def adopt(self) -> None:
        """Load the catalogue's objects of which the disk has every chunk. Other chunks are dropped."""
        if self._catalogue is None:
            return
        for record in self._catalogue.objects.values():
            if record.chunk_nbytes == self._chunk_nbytes and self.is_whole(record):
                self._index(record)
            else:
                self._catalogue.forget(record.info.key)
        orphans = [key for key, _ in self._store.blocks() if key not in self._object_of]
        await self._store.remove(orphans)
        log.info(
            "%d of %d objects were loaded; %d chunks of no object were dropped",
            len(self._objects),
            len(self._catalogue.objects),
            len(orphans),
        )

    def show(self, record: store_pb2.StoredObject) -> None:
        """Make a complete object visible, in place of its former version."""
        before = self._objects.get(record.info.key)
        if before is not None:
            self._forget(before)
        self._index(record)
        if self._catalogue is not None:
            self._catalogue.remember(record)

    def drop(self, record: store_pb2.StoredObject) -> None:
        """Hide an object. Current readers are not affected."""
        self._forget(record)
        if self._catalogue is not None:
            self._catalogue.forget(record.info.key)

    def used(self, record: store_pb2.StoredObject) -> None:
        self._quotas.used(record.owner, record.info.key)

    def discard(self, cut: ChunkPlan) -> None:
        """Remove chunks that are not visible. Returns at once; see ``settle``."""

        async def discard() -> None:
            for run in cut.runs():
                await self._store.remove(run.keys)

        removal = asyncio.create_task(discard())
        self._removals.add(removal)
        removal.add_done_callback(self._removals.discard)

    def chunk_changed(self, key: BlockKey, tier: Tier | None) -> None:
        if tier is None and (object_key := self._object_of.get(key)) is not None:
            # Called within a change of the store: drop the rest of the object after it.
            asyncio.get_running_loop().call_soon(self._lost, object_key, key)

    async def settle(self) -> None:
        """Wait until dropped objects are gone from disk and catalogue."""
        if self._removals:
            await asyncio.gather(*self._removals)
        if self._catalogue is not None:
            await self._catalogue.flush()

    async def close(self) -> None:
        """After ``settle``; the owner closes the store."""
        if self._catalogue is not None:
            await self._catalogue.close()

    def _index(self, record: store_pb2.StoredObject) -> None:
        key = record.info.key
        self._objects[key] = record
        self._quotas.shown(record.owner, key, self.taken_nbytes(record))
        self._runs[key] = list(self.cut(record).runs())
        for run in self._runs[key]:
            for chunk in run.keys:
                self._object_of[chunk] = key

    def _forget(self, record: store_pb2.StoredObject) -> None:
        del self._objects[record.info.key]
        self._quotas.gone(record.owner, record.info.key)
        for run in self._runs.pop(record.info.key):
            for chunk in run.keys:
                del self._object_of[chunk]
        self.discard(self.cut(record))

    def _lost(self, key: bytes, chunk: BlockKey) -> None:
        """A chunk is gone from every tier: evicted, or found damaged."""
        record = self._objects.get(key)
        if record is not None and self._object_of.get(chunk) == key and not self._store.match([chunk]):
            metrics.EVICTED_OBJECTS.labels("room").inc()
            self.drop(record)

    def check_integrity(self, *, nothing_else: bool) -> None:
        """Assert that every object is whole; with ``nothing_else`` the store holds no other chunk. Costs time
        proportional to the tier."""
        assert all(map(self.is_whole, self._objects.values())), "an object lacks chunks"
        if nothing_else and not self._removals:
            assert {key for key, _ in self._store.blocks()} <= self._object_of.keys(), "a chunk of no object"
