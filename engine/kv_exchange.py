"""Blocks between this node's memory and its peers': leases for those who read, reads for what is missed."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import asynccontextmanager
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import grpc.aio

from engine.block_memory import BlockMemory
from engine.errors import OutOfBlocks, PeerIncompatible
from kvstore import keys as block_keys
from kvstore.keys import BlockKey
from protos import node_pb2, node_pb2_grpc
from runtime import rpc
from transfer import AgentDescriptor, Peer, Span, TransferAgent, TransferReport

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Fetched:
    """What came of a fetch: the first ``num_blocks`` of the keys asked for are in the pool now, held once each."""

    block_ids: list[int] = field(default_factory=list)
    nbytes: int = 0
    seconds: float = 0.0


class KvExchange:
    """Reads blocks from peers into the pool. One for each node, on its event loop."""

    def __init__(self, memory: BlockMemory, agent: TransferAgent, *, deadline_s: float) -> None:
        self._memory = memory
        self._agent = agent
        self._deadline_s = deadline_s
        self._channels: dict[str, grpc.aio.Channel] = {}

    async def close(self) -> None:
        channels, self._channels = self._channels, {}
        for channel in channels.values():
            await channel.close()

    def channel(self, address: str) -> grpc.aio.Channel:
        """The one channel to a peer's gRPC server; it reconnects by itself."""
        channel = self._channels.get(address)
        if channel is None:
            channel = self._channels[address] = rpc.channel(address)
        return channel

    async def connect(self, source: node_pb2.KvAddress) -> Peer:
        """The peer whose memory ``source`` describes.

        Raises:
            PeerIncompatible: its blocks have another layout, so that they cannot be read here.
            TransferError: it cannot be reached.
        """
        if source.layout_fingerprint != self._memory.layout.fingerprint:
            raise PeerIncompatible(
                source.node_id, source.layout_fingerprint.hex(), self._memory.layout.fingerprint.hex()
            )
        return await self._agent.connect(AgentDescriptor.unpack(source.agent))

    async def read(
        self, peer: Peer, blocks: node_pb2.BlockSpans, first: int, block_ids: Sequence[int], *, deadline_s: float
    ) -> TransferReport:
        """Fill our pool's ``block_ids`` with ``blocks[first:]``, as many as there are ids; checksums are verified.

        After an error or a cancellation the bytes of ``block_ids`` are undefined; they must not be sealed.
        """
        nbytes, end = self._memory.layout.block_nbytes, first + len(block_ids)
        remote = [
            Span(region, offset, nbytes)
            for region, offset in zip(blocks.region[first:end], blocks.offset[first:end], strict=True)
        ]
        local = [self._memory.span(block) for block in block_ids]
        checksums = list(blocks.checksum[first:end]) or None
        return await peer.read(local, remote, deadline_s=deadline_s, checksums=checksums)

    async def fetch(self, source: node_pb2.KvAddress, chain: Sequence[BlockKey], num_local: int) -> Fetched:
        """Read blocks ``num_local …`` of ``chain`` from ``source`` and seal them here.

        The caller holds the first ``num_local`` blocks of the chain. What was read is held for the caller, who
        releases it; the source may hold fewer than expected, then fewer are read. Having no room here is no
        error either: nothing is read then.

        Raises:
            NodeUnavailable, RemoteError, TransferError, PeerIncompatible: nothing was sealed, nothing is held.
        """
        wanted, pool = chain[num_local:], self._memory.pool
        started_s = time.monotonic()
        async with self._lease(source, wanted) as blocks:
            try:
                block_ids = pool.allocate(len(blocks.offset))
            except OutOfBlocks:
                return Fetched()
            if not block_ids:
                return Fetched()
            try:
                peer = await self.connect(source)
                report = await self.read(peer, blocks, 0, block_ids, deadline_s=self._deadline_s)
            except BaseException:
                pool.release(block_ids)
                raise
        for i, block in enumerate(block_ids):
            at = num_local + i
            block_ids[i] = pool.seal(block, chain[at], chain[at - 1] if at else None)
        return Fetched(block_ids, report.nbytes, time.monotonic() - started_s)

    @asynccontextmanager
    async def _lease(
        self, source: node_pb2.KvAddress, wanted: Sequence[BlockKey]
    ) -> AsyncIterator[node_pb2.BlockSpans]:
        stub = node_pb2_grpc.NodeStub(self.channel(source.rpc_address))
        request = node_pb2.LeaseRequest(keys=block_keys.pack(wanted), ttl_s=2 * self._deadline_s)
        with rpc.calling(source.node_id):
            reply = await stub.Lease(request, timeout=self._deadline_s, metadata=rpc.request_metadata())
        try:
            yield reply.blocks
        finally:
            if reply.lease_id:
                # Nobody waits for it: a release that is lost ends with the lease.
                release = stub.Release(node_pb2.ReleaseRequest(lease_id=reply.lease_id), timeout=self._deadline_s)
                asyncio.ensure_future(_ignore_loss(release, source.node_id))
