"""The client of one store node's objects, in another process."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any, Self

from moonpool.kvstore.errors import StoreError
from moonpool.kvstore.grants.held import HeldGrant, holders_clock
from moonpool.kvstore.remote.joint_opens import JointOpens
from moonpool.protos import node_pb2, node_pb2_grpc, store_pb2, store_pb2_grpc
from moonpool.runtime import rpc
from moonpool.runtime.errors import NodeUnavailable, RemoteError
from moonpool.transfer import AgentDescriptor, Peer, Span, TransferAgent
from moonpool.transfer.connections.control import Control

log = logging.getLogger(__name__)

# Leases end with the next call that opens some, or after this time: a separate call costs both sides as much
# as a small read.
_CLOSE_AFTER_S = 0.02


class SourceBusy(StoreError):
    code = "RESOURCE_EXHAUSTED"

    def __init__(self, node_id: str, name: str) -> None:
        super().__init__(f"store node {node_id} has no memory free to read {name!r} from; try again later")


class ObjectGone(StoreError):
    """The object was dropped or replaced while it was being read."""

    code = "NOT_FOUND"

    def __init__(self, node_id: str, name: str) -> None:
        super().__init__(f"store node {node_id} no longer has {name!r} as it was when reading began")


class RemoteStore:
    """One store node. Use ``async with``, or ``close``. Calls raise ``NodeUnavailable`` and ``RemoteError``;
    those that move bytes also ``TransferError``."""

    def __init__(self, node_id: str, address: str, agent: TransferAgent, *, deadline_s: float) -> None:
        """``address``: host:port of its gRPC server. ``deadline_s``: of a call or a batch of transfers."""
        self.node_id = node_id
        self.address = address
        self.healthy = True  # by the index
        self.host_id = ""  # by the index; empty: unknown
        self.chunk_nbytes = 0  # of its objects; 0: not known yet
        self._agent = agent
        self._deadline_s = deadline_s
        self._channel = rpc.channel(address, direct=True)
        self._stub = store_pb2_grpc.StoreStub(self._channel)
        self._node = node_pb2_grpc.NodeStub(self._channel)
        self._readable = True  # our memory, by the node
        self._kv: node_pb2.KvAddress | None = None
        self._peer: Peer | None = None
        self._done: list[int] = []  # leases to end
        self._opens = JointOpens(self._open, self.release)
        self._closing: asyncio.Task[None] | None = None

    async def close(self) -> None:
        """End the remaining leases, if the node answers soon, and the connection."""
        closing = self._closing
        if closing is not None:
            await asyncio.wait((closing,), timeout=1.0)
            closing.cancel()
        await self._channel.close(None)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def call(self, method: str, request: Any) -> Any:
        with rpc.node_errors(self.node_id):
            return await getattr(self._stub, method)(request, timeout=self._deadline_s)

    def verify(self) -> Any:
        """The stream of ``VerifyProgress``; iterate it inside ``rpc.node_errors``. It may take minutes."""
        return self._stub.Verify(store_pb2.VerifyRequest())

    async def kv_address(self) -> node_pb2.KvAddress:
        """The address of its memory, cached until ``forget_peer``."""
        if self._kv is None:
            with rpc.node_errors(self.node_id):
                status = await self._node.Status(node_pb2.StatusRequest(), timeout=self._deadline_s)
            self._kv = status.kv
        return self._kv

    async def peer(self) -> Peer:
        if self._peer is None or self._peer.lost:
            self._peer = await self._agent.connect(AgentDescriptor.unpack((await self.kv_address()).agent))
        return self._peer

    def forget_peer(self) -> None:
        """The node may have restarted: ask for its address again."""
        self._kv = self._peer = None
        self._readable = True

    async def open(
        self, owner: bytes, wanted: Sequence[store_pb2.OpenObject]
    ) -> tuple[list[store_pb2.OpenedObject], int, HeldGrant]:
        """Pin the first chunks of each object. Returns them, the chunk size, and the grant to read them. Pass
        everything opened to ``release``; otherwise it expires."""
        return await self._opens.open(owner, wanted)

    async def _open(
        self, owner: bytes, wanted: Sequence[store_pb2.OpenObject]
    ) -> tuple[list[store_pb2.OpenedObject], int, HeldGrant]:
        done, self._done = self._done, []
        asked_s = holders_clock()
        request = store_pb2.OpenRequest(
            owner=owner, objects=wanted, ttl_s=2 * self._deadline_s, close_lease_id=done
        )
        try:
            reply: store_pb2.OpenReply = await self.call("Open", request)
        except BaseException:
            # The node may not have heard that they are ended; hearing it twice is harmless.
            self._end_leases(done)
            raise
        return list(reply.objects), reply.chunk_nbytes, self._held(asked_s, reply.granted_s)

    def _held(self, asked_s: float, granted_s: float) -> HeldGrant:
        return HeldGrant(f"store node {self.node_id}", asked_s, granted_s)

    def release(self, opened: Sequence[store_pb2.OpenedObject]) -> None:
        """The chunks have been read. Returns at once; the node is told with the next call, or soon."""
        self._end_leases([lease_id for each in opened for lease_id in each.lease_id])

    def _end_leases(self, lease_ids: Sequence[int]) -> None:
        self._done += lease_ids
        if self._done and self._closing is None:
            self._closing = asyncio.create_task(self._close_leases())

    async def _close_leases(self) -> None:
        try:
            await asyncio.sleep(_CLOSE_AFTER_S)
            while self._done:
                done, self._done = self._done, []
                try:
                    await self.call("Close", store_pb2.CloseRequest(lease_id=done))
                except (NodeUnavailable, RemoteError) as error:
                    log.info("%d leases were not ended and will expire: %s", len(done), error)
        finally:
            self._closing = None

    async def read(
        self,
        owner: bytes,
        opened: store_pb2.OpenedObject,
        held: HeldGrant,
        first: int,
        end: int,
        span_of: Callable[[int], Span],
    ) -> list[int]:
        """Read chunks ``first … end - 1`` into ``span_of(chunk)``, our spans; returns their checksums.
        ``opened`` starts at ``first`` and is released; the next window is opened while one is read.

        Raises ``SourceBusy``, ``ObjectGone``, ``TransferError`` (also ``ChecksumMismatch``). The spans are
        undefined then.
        """
        info, at = opened.info, first
        following: asyncio.Task[tuple[store_pb2.OpenedObject, HeldGrant]] | None = None
        checksums: list[int] = []
        try:
            while True:
                count = min(len(opened.chunks.offset), end - at)
                if count == 0:
                    raise SourceBusy(self.node_id, info.name)
                if at + count < end:
                    following = asyncio.create_task(self.reopen(owner, info, at + count))
                await self.fetch([span_of(chunk) for chunk in range(at, at + count)], [opened], held)
                checksums += opened.chunks.checksum[:count]
                at += count
                if following is None:
                    return checksums
                self.release([opened])
                (opened, held), following = await following, None
        finally:
            self.release([opened])
            if following is not None:
                following.add_done_callback(self._give_back)
                following.cancel()

    def _give_back(self, opening: asyncio.Task[tuple[store_pb2.OpenedObject, HeldGrant]]) -> None:
        """The window that it opened is not read any more."""
        if not opening.cancelled() and opening.exception() is None:
            self.release([opening.result()[0]])

    async def fetch(
        self, ours: Sequence[Span], opened: Sequence[store_pb2.OpenedObject], held: HeldGrant
    ) -> None:
        """Read chunks opened under ``held``, one object after the other, into our spans in one batch. Chunks
        beyond ``ours`` are ignored. Raises as ``read``."""
        regions = [region for each in opened for region in each.chunks.region]
        offsets = [offset for each in opened for offset in each.chunks.offset]
        checksums = [value for each in opened for value in each.chunks.checksum][: len(ours)]
        theirs = [
            Span(region, offset, span.nbytes)
            for region, offset, span in zip(regions, offsets, ours, strict=False)
        ]
        peer = await self.peer()
        with held.within(self._deadline_s) as limit_s:
            await peer.read(ours, theirs, deadline_s=limit_s, checksums=checksums)

    async def reopen(
        self, owner: bytes, info: store_pb2.ObjectInfo, first: int
    ) -> tuple[store_pb2.OpenedObject, HeldGrant]:
        """Open the same bytes of an object from chunk ``first``. Raises ``ObjectGone``."""
        wanted = store_pb2.OpenObject(key=info.key, storage=info.storage, first_chunk=first)
        (opened,), _, held = await self.open(owner, [wanted])
        if opened.absent:
            raise ObjectGone(self.node_id, info.name)
        return opened, held

    async def reads_from_us(self) -> bool:
        """Whether it can read objects from our memory itself."""
        if not self._readable:
            return False
        near = self._agent.shares_memory_with(AgentDescriptor.unpack((await self.kv_address()).agent))
        # It reads over the connection that we have made to it; there is none to an agent of this process.
        return near and isinstance((await self.peer()).link, Control)

    async def begin(
        self,
        owner: bytes,
        objects: Sequence[store_pb2.ObjectInfo],
        data: Sequence[bytes] = (),
        chunks: Sequence[node_pb2.BlockSpans] = (),
    ) -> tuple[store_pb2.PutReply, HeldGrant]:
        """Reserve room for the first chunks of each; small objects come with their ``data``, others with
        none. ``chunks``: where all of them are in our memory, for a node that ``reads_from_us``; it may have
        read some objects when it answers, and others are to be written. Returns the reply and the grant to
        write them."""
        request = store_pb2.BeginRequest(
            owner=owner,
            objects=objects,
            ttl_s=2 * self._deadline_s,
            data=data,
            source=self._agent.incarnation if chunks else b"",
            chunks=chunks,
        )
        asked_s = holders_clock()
        reply: store_pb2.PutReply = await self.call("Begin", request)
        self.chunk_nbytes = reply.chunk_nbytes
        self._readable = self._readable and not reply.unreadable
        return reply, self._held(asked_s, reply.granted_s)

    async def commit(
        self, written: Sequence[store_pb2.WrittenChunks]
    ) -> tuple[store_pb2.PutReply, HeldGrant]:
        """Returns as ``begin``, for the next chunks."""
        asked_s = holders_clock()
        reply: store_pb2.PutReply = await self.call("Commit", store_pb2.CommitRequest(written=written))
        return reply, self._held(asked_s, reply.granted_s)

    async def write(
        self,
        ours: Sequence[Span],
        chunks: Sequence[tuple[int, int]],
        checksums: Sequence[int],
        write_grant: int,
        held: HeldGrant,
    ) -> None:
        """Write our spans to the node's ``(region, offset)`` of chunks reserved under the grant."""
        theirs = [
            Span(region, offset, span.nbytes) for span, (region, offset) in zip(ours, chunks, strict=True)
        ]
        peer = await self.peer()
        with held.within(self._deadline_s) as limit_s:
            await peer.write(ours, theirs, deadline_s=limit_s, checksums=checksums, grant=write_grant)
