"""The service ``protos.Store``: the objects of a store node."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any
from weakref import WeakValueDictionary

import grpc.aio

from moonpool.kvstore.blocks import keys as block_keys
from moonpool.kvstore.blocks.keys import KEY_NBYTES
from moonpool.kvstore.client.tenant import MOST_NAME_NBYTES
from moonpool.kvstore.objects import metrics
from moonpool.kvstore.objects.chunks import is_small
from moonpool.kvstore.objects.copies import copy_object, pull_objects
from moonpool.kvstore.objects.errors import BadRequest, ObjectsOff, PutBroken
from moonpool.kvstore.objects.put import Put
from moonpool.kvstore.objects.read_leases import Opened
from moonpool.kvstore.objects.record_values import Record
from moonpool.kvstore.objects.shelf import ObjectShelf
from moonpool.kvstore.remote.object_store import RemoteStore
from moonpool.kvstore.store_node.record_keeper import RecordKeeper
from moonpool.kvstore.store_node.verification import Shelf, verify
from moonpool.protos import node_pb2, store_pb2, store_pb2_grpc
from moonpool.runtime.errors import MoonpoolError
from moonpool.transfer import Region, Span, TransferAgent, TransferError, checksum

log = logging.getLogger(__name__)

_LIST_LIMIT = 1000

Context = grpc.aio.ServicerContext[Any, Any]


class StoreService(store_pb2_grpc.StoreServicer):
    """Checks requests and returns offsets; ``ObjectShelf`` does the rest."""

    def __init__(
        self,
        node_id: str,
        objects: ObjectShelf | None,
        keeper: RecordKeeper | None,
        region: Region | None,
        agent: TransferAgent,
        *,
        deadline_s: float,
        check_takes_work: Callable[[], None],
        shelves: Callable[[], Sequence[Shelf]],
    ) -> None:
        """``objects``, the ``keeper`` of their records and the ``region`` of their memory; None: this node
        has none."""
        self._node_id = node_id
        self._shelf = objects
        self._record_keeper = keeper
        self._region = region
        self._agent = agent
        self._deadline_s = deadline_s
        self._check_takes_work = check_takes_work
        self._shelves = shelves
        self._copying = WeakValueDictionary[tuple[bytes, int], asyncio.Lock]()  # by owner and storage

    @property
    def _objects(self) -> ObjectShelf:
        if self._shelf is None:
            raise ObjectsOff(self._node_id)
        return self._shelf

    @property
    def _keeper(self) -> RecordKeeper:
        if self._record_keeper is None:
            raise ObjectsOff(self._node_id)
        return self._record_keeper

    async def Begin(self, request: store_pb2.BeginRequest, context: Context) -> store_pb2.PutReply:
        self._check_takes_work()
        owner = _key(request.owner, "owner")
        if request.data and len(request.data) != len(request.objects):
            raise BadRequest(f"data must be given for all {len(request.objects)} objects or for none")
        # Before any byte is moved: a put without Redis fails.
        await self._keeper.records.check()

        if request.source and len(request.chunks) != len(request.objects):
            raise BadRequest(f"chunks must be given for all {len(request.objects)} objects with a source")
        readable = bool(request.source) and await self._pull(owner, request)

        async def begin(info: store_pb2.ObjectInfo, data: bytes) -> tuple[int, Put]:
            _check_info(info)
            return await self._objects.begin(owner, info, request.ttl_s, data)

        # Those that were pulled are here already.
        pairs = zip(request.objects, request.data or [b""] * len(request.objects), strict=True)
        steps = [await self._step(0, begin(info, data)) for info, data in pairs]
        reply = self._put_reply(steps, self._objects.chunk_nbytes)
        reply.unreadable = bool(request.source) and not readable
        return reply

    async def _pull(self, owner: bytes, request: store_pb2.BeginRequest) -> bool:
        """Read objects from their writer. False: its memory cannot be read."""
        assert self._region is not None
        try:
            source = self._agent.reader_of(request.source)
        except TransferError as error:
            log.info("objects are not read from their writer: %s", error)
            return False
        try:
            for info in request.objects:
                _check_info(info)
            await pull_objects(
                self._objects,
                source,
                self._region,
                owner,
                list(zip(request.objects, request.chunks, strict=True)),
                # The caller waits longer: there is time to write them instead.
                deadline_s=min(self._deadline_s, request.ttl_s) / 2,
            )
        except MoonpoolError as error:
            # The caller writes them, and is told what is wrong then.
            log.info("objects were not read from their writer: %s", error)
        return True

    async def Commit(self, request: store_pb2.CommitRequest, context: Context) -> store_pb2.PutReply:
        async def commit(written: store_pb2.WrittenChunks) -> tuple[int, Put]:
            return written.put_id, await self._objects.commit(written.put_id, list(written.checksum))

        steps = [await self._step(written.put_id, commit(written)) for written in request.written]
        return self._put_reply(steps)

    async def _step(
        self, put_id: int, call: Awaitable[tuple[int, Put]]
    ) -> tuple[store_pb2.PutStep, Put | None]:
        assert self._region is not None
        try:
            put_id, put = await call
        except MoonpoolError as error:
            metrics.PUTS.labels("failed").inc()
            return store_pb2.PutStep(put_id=put_id, error=str(error)), None
        offsets = put.offsets
        if not offsets:
            return store_pb2.PutStep(put_id=put_id, done=True), None
        chunks = node_pb2.BlockSpans(region=[self._region.id] * len(offsets), offset=offsets)
        return store_pb2.PutStep(put_id=put_id, chunks=chunks), put

    def _put_reply(
        self, steps: Sequence[tuple[store_pb2.PutStep, Put | None]], chunk_nbytes: int = 0
    ) -> store_pb2.PutReply:
        """Grant the chunks of all steps together: they are written in one batch."""
        assert self._region is not None
        reply = store_pb2.PutReply(chunk_nbytes=chunk_nbytes, steps=[step for step, _ in steps])
        # Some may have lapsed while others waited for room.
        puts = [put for _, put in steps if put is not None and put.offsets and put.grant is not None]
        if puts:
            nbytes = self._objects.chunk_nbytes
            spans = [Span(self._region.id, offset, nbytes) for put in puts for offset in put.offsets]
            reply.granted_s = min(put.grant.granted_s for put in puts if put.grant is not None)
            writable = self._agent.grant_writes(spans, lasts_s=reply.granted_s)
            for put in puts:
                put.writable = writable
            reply.write_grant = writable.id
        return reply

    async def Abort(self, request: store_pb2.AbortRequest, context: Context) -> store_pb2.AbortReply:
        for put_id in request.put_id:
            self._objects.abort(put_id)
        for storage in request.storage:
            record = self._objects.inventory.find(request.owner, storage)
            if record is not None and not record.HasField("record"):
                self._objects.inventory.drop(record)
        return store_pb2.AbortReply()

    async def Publish(self, request: store_pb2.PublishRequest, context: Context) -> store_pb2.PublishReply:
        owner = _key(request.owner, "owner")
        return store_pb2.PublishReply(error=await self._keeper.publish(owner, request.objects))

    async def Copy(self, request: store_pb2.CopyRequest, context: Context) -> store_pb2.CopyReply:
        self._check_takes_work()
        owner = _key(request.owner, "owner")
        # Whoever asks for the same copy meanwhile finds it here afterwards.
        async with self._copying.setdefault((owner, request.storage), asyncio.Lock()):
            return await self._copy(owner, request)

    async def _copy(self, owner: bytes, request: store_pb2.CopyRequest) -> store_pb2.CopyReply:
        began_s = time.monotonic()
        wanted = store_pb2.OpenObject(key=_key(request.key, "key"), storage=request.storage)
        objects, address = self._objects, request.source.rpc_address
        assert self._region is not None
        async with RemoteStore(
            request.source.node_id, address, self._agent, deadline_s=self._deadline_s
        ) as source:
            nbytes = await copy_object(source, objects, self._region, owner, wanted, surplus=request.surplus)
        metrics.COPIED_BYTES.labels("objects").inc(nbytes)
        stored = objects.inventory.find(owner, request.storage)
        if request.join and stored is not None:
            try:
                await self._keeper.join(stored)
            except PutBroken:
                objects.inventory.drop(stored)
                raise
        return store_pb2.CopyReply(nbytes=nbytes, seconds=time.monotonic() - began_s)

    async def Open(self, request: store_pb2.OpenRequest, context: Context) -> store_pb2.OpenReply:
        owner = _key(request.owner, "owner")
        self._objects.leases.release(request.close_lease_id)
        asked = [_key(wanted.key, "key") for wanted in request.objects if not wanted.storage]
        found = dict(
            zip(asked, await self._keeper.records.read([(owner, key) for key in asked]), strict=True)
        )
        reply = store_pb2.OpenReply(chunk_nbytes=self._objects.chunk_nbytes, granted_s=request.ttl_s)
        for wanted in request.objects:
            opened, granted_s = await self._open(owner, wanted, found.get(wanted.key), request.ttl_s)
            reply.objects.append(opened)
            reply.granted_s = min(reply.granted_s, granted_s)
        return reply

    async def _open(
        self, owner: bytes, wanted: store_pb2.OpenObject, record: Record | None, ttl_s: float
    ) -> tuple[store_pb2.OpenedObject, float]:
        """Returns what is here, and how long it may be read. ``record``: what Redis says; None: there is
        none, or these bytes are wanted whatever it says."""
        places: Sequence[str] = ()
        if not wanted.storage:
            if record is None:
                return store_pb2.OpenedObject(absent=True), ttl_s
            wanted.storage, places = record.storage, record.body.places
        opened = await self._objects.leases.open(owner, wanted, ttl_s)
        if opened is not None:
            return self._opened(opened), opened.granted_s
        if record is None or self._node_id in places:
            self._keeper.missing((owner, wanted.key), wanted.storage)
        info = None if record is None else record.body.info
        return store_pb2.OpenedObject(info=info, places=places, absent=True), ttl_s

    def _opened(self, opened: Opened) -> store_pb2.OpenedObject:
        assert self._region is not None
        stored = opened.record
        if is_small(stored.info):
            return store_pb2.OpenedObject(info=stored.info, data=stored.data, checksum=stored.tail_checksum)
        chunks = node_pb2.BlockSpans(
            region=[self._region.id] * len(opened.offsets), offset=opened.offsets, checksum=opened.checksums
        )
        return store_pb2.OpenedObject(
            info=stored.info, chunks=chunks, lease_id=opened.lease_ids, checksum=checksum(b"")
        )

    async def Close(self, request: store_pb2.CloseRequest, context: Context) -> store_pb2.CloseReply:
        self._objects.leases.release(request.lease_id)
        return store_pb2.CloseReply()

    async def Find(self, request: store_pb2.FindRequest, context: Context) -> store_pb2.FindReply:
        owner = _key(request.owner, "owner")
        keys = block_keys.unpack(request.keys)
        if request.last_known:
            known = (
                _last_known(stored) for key in keys for stored in self._objects.inventory.of_key(owner, key)
            )
            return store_pb2.FindReply(found=[record for record in known if record is not None])
        found = await self._keeper.records.read([(owner, key) for key in keys])
        if request.only_whether:
            return store_pb2.FindReply(exists=bytes(record is not None for record in found))
        return store_pb2.FindReply(found=[record.body for record in found if record is not None])

    async def Check(self, request: store_pb2.CheckRequest, context: Context) -> store_pb2.CheckReply:
        owner = _key(request.owner, "owner")
        dropped = [await self._objects.leases.check(owner, each.storage) for each in request.objects]
        await self._keeper.reported()
        return store_pb2.CheckReply(num_dropped=sum(dropped))

    async def List(self, request: store_pb2.ListRequest, context: Context) -> store_pb2.ListReply:
        owner = _key(request.owner, "owner")
        if request.last_known:
            mine = [_last_known(stored) for stored in self._objects.inventory if stored.owner == owner]
            return store_pb2.ListReply(objects=[record for record in mine if record is not None])
        reply, cursor = store_pb2.ListReply(), request.cursor
        while len(reply.objects) < _LIST_LIMIT:
            page, cursor = await self._keeper.records.scan(cursor, owner)
            reply.objects.extend(record.body for record in page)
            if not cursor:
                break
        reply.cursor = cursor
        return reply

    async def Remove(self, request: store_pb2.RemoveRequest, context: Context) -> store_pb2.RemoveReply:
        owner = _key(request.owner, "owner")
        objects = [((owner, _key(each.key, "key")), each.storage) for each in request.objects]
        done = await self._keeper.remove(objects)
        return store_pb2.RemoveReply(removed=[each for each, _ in done], storage=[left for _, left in done])

    async def Reconcile(
        self, request: store_pb2.ReconcileRequest, context: Context
    ) -> store_pb2.ReconcileReply:
        inventory = self._objects.inventory
        keys = block_keys.unpack(request.keys)
        here = [stored for key in keys for stored in inventory.of_key(request.owner, key)]
        await self._keeper.compare(here)
        return store_pb2.ReconcileReply()

    async def Usage(self, request: store_pb2.UsageRequest, context: Context) -> store_pb2.UsageReply:
        owner = _key(request.owner, "owner")
        every = () if self._shelf is None else self._shelf.inventory
        mine = [record for record in every if record.owner == owner]
        return store_pb2.UsageReply(
            chunk_nbytes=0 if self._shelf is None else self._shelf.chunk_nbytes,
            num_objects=len(mine),
            objects_nbytes=sum(record.info.nbytes for record in mine),
            tiers=[
                store_pb2.StoreTier(
                    shelf=shelf.name,
                    tier=tier.name,
                    block_nbytes=shelf.store.layout.block_nbytes,
                    num_blocks=tier.capacity_blocks,
                    num_held=tier.num_blocks,
                )
                for shelf in self._shelves()
                for tier in shelf.store.stats.tiers
            ],
        )

    async def Verify(
        self, request: store_pb2.VerifyRequest, context: Context
    ) -> AsyncIterator[store_pb2.VerifyProgress]:
        async for progress in verify(self._shelves()):
            yield progress


def _last_known(stored: store_pb2.StoredObject) -> store_pb2.ObjectRecord | None:
    """What the record last said, with this node's clock for its end; None: no record has named it."""
    expires_ms = stored.record.expires_ms
    if not stored.HasField("record") or (expires_ms and expires_ms <= time.time() * 1000):
        return None
    known = store_pb2.ObjectRecord()
    known.CopyFrom(stored.record)
    known.info.CopyFrom(stored.info)
    return known


def _key(value: bytes, name: str) -> bytes:
    if len(value) != KEY_NBYTES:
        raise BadRequest(f"{name} must be {KEY_NBYTES} bytes, got {len(value)}")
    return value


def _check_info(info: store_pb2.ObjectInfo) -> None:
    _key(info.key, "object.key")
    if not info.storage:
        raise BadRequest("object.storage must not be 0")
    if len(info.name.encode()) > MOST_NAME_NBYTES:
        raise BadRequest(f"object.name must be at most {MOST_NAME_NBYTES} bytes")
