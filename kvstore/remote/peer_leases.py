"""Leases on blocks of other nodes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import grpc.aio

from moonpool.kvstore.blocks import keys as block_keys
from moonpool.kvstore.blocks.keys import BlockKey
from moonpool.kvstore.grants.held import HeldGrant, holders_clock
from moonpool.protos import node_pb2, node_pb2_grpc
from moonpool.runtime import rpc
from moonpool.runtime.errors import NodeUnavailable, RemoteError

log = logging.getLogger(__name__)


class RemoteLeases:
    """Leases at other nodes, and one channel to each of them. Close it with its node."""

    def __init__(self, deadline_s: float) -> None:
        """``deadline_s``: of a call; leases are asked for twice as long."""
        self._deadline_s = deadline_s
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._releases: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        """End every connection. Remaining leases expire."""
        for release in self._releases:
            release.cancel()
        channels, self._channels = self._channels, {}
        for channel in channels.values():
            await channel.close(None)

    def channel(self, address: str) -> grpc.aio.Channel:
        """The channel to a node; it reconnects by itself. Calls within a host are direct."""
        channel = self._channels.get(address)
        if channel is None:
            channel = self._channels[address] = rpc.channel(address, direct=True)
        return channel

    @asynccontextmanager
    async def hold(
        self, source: node_pb2.KvAddress, wanted: Sequence[BlockKey]
    ) -> AsyncIterator[tuple[node_pb2.BlockSpans, HeldGrant]]:
        """Keep the longest prefix of ``wanted`` that ``source`` has pinned there inside the block. It must be
        read ``within`` the grant. Raises ``NodeUnavailable``, ``RemoteError``."""
        stub = node_pb2_grpc.NodeStub(self.channel(source.rpc_address))
        request = node_pb2.LeaseRequest(keys=block_keys.pack(wanted), ttl_s=2 * self._deadline_s)
        asked_s = holders_clock()
        with rpc.node_errors(source.node_id):
            reply = await stub.Lease(request, timeout=self._deadline_s, metadata=rpc.request_metadata())
        try:
            yield reply.blocks, HeldGrant(f"node {source.node_id}", asked_s, reply.granted_s)
        finally:
            self.release(source, reply.lease_id)

    async def prolong(self, source: node_pb2.KvAddress, lease_id: int, held: HeldGrant) -> None:
        """Renew a lease of which less than half of a call's deadline is left. Raises ``NodeUnavailable``,
        ``RemoteError``."""
        if held.seconds_left > self._deadline_s / 2:
            return
        stub = node_pb2_grpc.NodeStub(self.channel(source.rpc_address))
        request = node_pb2.RenewRequest(lease_id=lease_id, ttl_s=2 * self._deadline_s)
        asked_s = holders_clock()
        with rpc.node_errors(source.node_id):
            reply = await stub.Renew(request, timeout=self._deadline_s, metadata=rpc.request_metadata())
        held.renewed(asked_s, reply.granted_s)

    def release(self, source: node_pb2.KvAddress, lease_id: int) -> None:
        """End a lease, in the background: if that is lost, it expires."""
        if lease_id:
            stub = node_pb2_grpc.NodeStub(self.channel(source.rpc_address))
            release = asyncio.create_task(self._release(stub, source.node_id, lease_id))
            self._releases.add(release)
            release.add_done_callback(self._releases.discard)

    async def _release(self, stub: node_pb2_grpc.NodeAsyncStub, node_id: str, lease_id: int) -> None:
        try:
            with rpc.node_errors(node_id):
                await stub.Release(node_pb2.ReleaseRequest(lease_id=lease_id), timeout=self._deadline_s)
        except (NodeUnavailable, RemoteError) as error:
            log.info("a lease was not ended and will expire: %s", error)
