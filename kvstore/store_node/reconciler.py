"""The background work that keeps a node's objects and their records equal: after its start, after Redis lost
its data, and where a node with a copy is gone."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping

from moonpool.kvstore.client.connections import StoreNodes, preference_order
from moonpool.kvstore.client.errors import NoStoreNodes
from moonpool.kvstore.errors import StoreError
from moonpool.kvstore.objects import metrics
from moonpool.kvstore.objects.record_values import bucket_of
from moonpool.kvstore.objects.shelf import ObjectShelf
from moonpool.kvstore.remote.object_store import RemoteStore
from moonpool.kvstore.store_node.record_keeper import RecordKeeper
from moonpool.protos import node_pb2, store_pb2
from moonpool.runtime.errors import NodeUnavailable, RemoteError

log = logging.getLogger(__name__)

EVERY_S = 1.0
# Objects compared with their records in each turn, so that a node with many does not burden Redis.
_SLICE = 512
# A node that is away for longer is replaced as a place; most come back sooner, with what was on disk.
_AWAY_S = 15.0
# Looking through all objects for lost copies takes at most this part of the time.
_IDLE_PER_BUSY = 50
# Copies made in each turn.
_MOST_REPAIRS = 16


class Reconciler:
    """``await run()`` until it is cancelled."""

    def __init__(
        self,
        node_id: str,
        shelf: ObjectShelf,
        keeper: RecordKeeper,
        peers: StoreNodes,
        address: Callable[[], node_pb2.KvAddress],
    ) -> None:
        """``address``: of this node's memory, for those that copy from it."""
        self._node_id = node_id
        self._shelf = shelf
        self._keeper = keeper
        self._records = keeper.records
        self._peers = peers
        self._address = address
        self._scanned = False  # the records that name this node were compared with what it has
        self._to_compare: list[int] = []  # storage ids of what is here, the next one last
        self._away_since_s: dict[str, float] = {}
        self._repair_s = float("-inf")  # when to look for lost copies next

    async def run(self) -> None:
        while True:
            await asyncio.sleep(EVERY_S)
            await self.turn()

    async def turn(self) -> None:
        """One round of everything; it ends early if Redis or a node does not answer."""
        try:
            await self._turn()
        except (StoreError, NodeUnavailable, RemoteError) as error:
            log.info("objects are not compared with their records for now: %s", error)
            # Others may have changed what is here meanwhile.
            self._to_compare = []

    async def _turn(self) -> None:
        await self._records.look()
        for bucket in self._records.lost_buckets():
            await self._restore(bucket)
        if not self._records.lost_buckets():
            if not self._scanned:
                await self._scan()
            self._keeper.report_again()
            await self._compare()
        if time.monotonic() >= self._repair_s:
            began_s = time.monotonic()
            await self._repair()
            self._repair_s = time.monotonic() + _IDLE_PER_BUSY * (time.monotonic() - began_s)

    async def _scan(self) -> None:
        """Leave the records that name this node though its bytes are gone: they were only in memory."""
        cursor, num_left = 0, 0
        while True:
            page, cursor = await self._records.scan(cursor)
            for record in page:
                here = self._shelf.inventory.get(record.storage)
                if self._node_id in record.body.places and here is None:
                    await self._keeper.leave(record.name, record.storage, [self._node_id])
                    num_left += 1
            if not cursor:
                break
        self._scanned = True
        if num_left:
            log.info("%d objects were lost with the former life of this node", num_left)

    async def _compare(self) -> None:
        if not self._to_compare:
            self._to_compare = [record.info.storage for record in self._shelf.inventory]
        some, self._to_compare = self._to_compare[-_SLICE:], self._to_compare[:-_SLICE]
        here = [record for each in some if (record := self._shelf.inventory.get(each)) is not None]
        if here:
            await self._keeper.compare(here)

    async def _restore(self, bucket: int) -> None:
        """Redis lost a bucket: write the records that were known here, unless others know later ones."""
        num_restored = 0
        for stored in list(self._shelf.inventory):
            if bucket_of(stored.info.key) != bucket or not stored.HasField("record"):
                continue
            record = store_pb2.ObjectRecord()
            record.CopyFrom(stored.record)
            record.info.CopyFrom(stored.info)
            record.info.surplus = False
            del record.places[:]
            record.places.append(self._node_id)
            there = await self._records.restore(record)
            if there.storage != stored.info.storage:
                self._shelf.inventory.drop(stored)
            elif self._node_id not in there.body.places:
                await self._records.swap(there, [*there.body.places, self._node_id], restoring=True)
            num_restored += 1
        if self._records.restored(bucket) and num_restored:
            log.warning("Redis lost its data: %d records of objects were restored", num_restored)

    async def _repair(self) -> None:
        """Where a place is gone for long, or a copy was lost, the first of the others has it copied."""
        try:
            nodes = await self._peers.current()
        except NoStoreNodes:
            return
        away = self._away(nodes)
        num_left = _MOST_REPAIRS
        for stored in list(self._shelf.inventory):
            record = stored.record
            present = [each for each in record.places if each not in away]
            if len(present) >= record.copies or not present or present[0] != self._node_id:
                continue
            if target := self._target(stored, present, nodes):
                await self._copy_to(target, stored, [each for each in record.places if each in away])
                num_left -= 1
                if not num_left:
                    return

    def _away(self, nodes: Mapping[str, RemoteStore]) -> set[str]:
        """The places that are not in the cluster for so long that they are taken as lost."""
        places = {each for stored in self._shelf.inventory for each in stored.record.places}
        now_s = time.monotonic()
        self._away_since_s = {
            each: self._away_since_s.get(each, now_s)
            for each in places
            if each not in nodes and each != self._node_id
        }
        return {each for each, since_s in self._away_since_s.items() if now_s - since_s >= _AWAY_S}

    def _target(
        self, stored: store_pb2.StoredObject, present: list[str], nodes: Mapping[str, RemoteStore]
    ) -> RemoteStore | None:
        hosts = {nodes[each].host_id for each in present if each in nodes}
        for node_id in preference_order(stored.info.key, nodes):
            node = nodes[node_id]
            if node_id not in stored.record.places and node.healthy and node.host_id not in hosts:
                return node
        return None

    async def _copy_to(self, target: RemoteStore, stored: store_pb2.StoredObject, lost: list[str]) -> None:
        name = (stored.owner, stored.info.key)
        request = store_pb2.CopyRequest(
            owner=stored.owner,
            key=stored.info.key,
            storage=stored.info.storage,
            source=self._address(),
            join=True,
        )
        try:
            await target.call("Copy", request)
        except (NodeUnavailable, RemoteError) as error:
            log.warning("%r was not copied to %s: %s", stored.info.name, target.node_id, error)
            target.forget_peer()
            return
        metrics.REPAIRED_OBJECTS.inc()
        if lost:
            await self._keeper.leave(name, stored.info.storage, lost)
        await self._keeper.compare([stored])
