"""Reads of blocks from peers, under their leases."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import grpc.aio

from moonpool.engine.memory.block_memory import BlockMemory
from moonpool.engine.prefix_cache.read_limit import ReadLimit
from moonpool.kvstore.blocks.keys import BlockKey
from moonpool.kvstore.remote.peer_leases import RemoteLeases
from moonpool.kvstore.remote.sharded_reader import ShardedReader
from moonpool.protos import node_pb2
from moonpool.runtime.errors import MoonpoolError, NodeUnavailable, RemoteError
from moonpool.runtime.failures import FailureClass
from moonpool.runtime.observing import tracing
from moonpool.transfer import AgentDescriptor, Peer, Span, TransferAgent, TransferError, TransferReport

log = logging.getLogger(__name__)


class PeerIncompatible(MoonpoolError):
    """A peer's blocks have another layout than this node's."""

    code = "FAILED_PRECONDITION"
    failure = FailureClass.NODE

    def __init__(self, node_id: str, theirs: str, ours: str) -> None:
        super().__init__(
            f"node {node_id} has KV blocks of layout {theirs}, this node of {ours}: set the same model, "
            "dtype and engine.block_size on all nodes"
        )
        self.node_id = node_id


@dataclass(frozen=True, slots=True)
class KvSource:
    """A source of blocks. ``peer``: its agent; None if its blocks or ours are in parts."""

    address: node_pb2.KvAddress
    peer: Peer | None


@dataclass(slots=True)
class Fetched:
    """The result of a fetch. ``block_ids``: the first blocks of the chain, acquired for the caller."""

    block_ids: list[int] = field(default_factory=list)
    num_read: int = 0  # of block_ids, the last ones, from the peer
    num_missing: int = 0  # blocks of the chain on neither node
    nbytes: int = 0
    seconds: float = 0.0


class PeerExchange:
    """Reads blocks from peers into the pool. One for each node, on its event loop."""

    def __init__(
        self,
        memory: BlockMemory,
        agent: TransferAgent,
        *,
        deadline_s: float,
        reader: ShardedReader,
        in_parts: bool,
    ) -> None:
        """``reader``: for blocks in parts, here (``in_parts``) or at the peer."""
        self._reader = reader
        self._in_parts = in_parts
        self._memory = memory
        self._agent = agent
        self._deadline_s = deadline_s
        self._limit = ReadLimit(agent.options.read_nbytes_per_s)
        self.leases = RemoteLeases(deadline_s)

    async def close(self) -> None:
        """End every connection to a peer."""
        await self.leases.close()

    def channel(self, address: str) -> grpc.aio.Channel:
        """Return the channel to a peer's gRPC server. It reconnects by itself."""
        return self.leases.channel(address)

    def bandwidth(self) -> dict[str, float]:
        """Bytes/s by node id that reads from the connected peers get."""
        most = self._limit.nbytes_per_s
        return {node_id: min(rate, most) for node_id, rate in self._agent.bandwidth().items()}

    async def connect(self, source: node_pb2.KvAddress) -> KvSource:
        """Connect to the peer described by ``source``. Raises PeerIncompatible, or TransferError if
        unreachable."""
        if source.layout_fingerprint != self._memory.layout.fingerprint:
            theirs = source.layout or source.layout_fingerprint.hex()
            raise PeerIncompatible(source.node_id, theirs, str(self._memory.layout))
        if self._in_parts or source.ranks:
            return KvSource(source, None)
        return KvSource(source, await self._agent.connect(AgentDescriptor.unpack(source.agent)))

    async def read(
        self,
        source: KvSource,
        blocks: node_pb2.BlockSpans,
        first: int,
        block_ids: Sequence[int],
        *,
        deadline_s: float,
    ) -> TransferReport:
        """Read ``blocks[first:]`` into as many ``block_ids`` of the pool and verify checksums.

        After an error or a cancellation the bytes of ``block_ids`` are undefined: do not seal them.
        """
        nbytes, end = self._memory.layout.block_nbytes, first + len(block_ids)
        regions, offsets = blocks.region[first:end], blocks.offset[first:end]
        checksums = list(blocks.checksum[first:end]) or None
        with tracing.span("read blocks", num_blocks=len(block_ids), nbytes=nbytes * len(block_ids)) as span:
            node_id = source.address.node_id
            deadline_s -= await self._limit.turn(node_id, nbytes * len(block_ids), deadline_s)
            await self._memory.pool.ready()
            if source.peer is None:
                report = await self._reader.read(
                    source.address,
                    regions,
                    offsets,
                    block_ids,
                    deadline_s=deadline_s,
                    checksums=checksums or (),
                )
            else:
                remote = [Span(*where, nbytes) for where in zip(regions, offsets, strict=True)]
                local = [self._memory.span(block) for block in block_ids]
                report = await source.peer.read(local, remote, deadline_s=deadline_s, checksums=checksums)
            span.set_attribute("transport", report.transport)
            return report

    async def fetch(self, source: node_pb2.KvAddress, chain: Sequence[BlockKey]) -> Fetched:
        """Read the blocks of ``chain`` that are missing here from ``source`` and seal them.

        The caller releases ``block_ids``. Reads less if the source has fewer blocks, and nothing without
        room here beside what runs. Raises NodeUnavailable, RemoteError, TransferError or PeerIncompatible; no
        block is acquired then.
        """
        pool = self._memory.pool
        blocks = pool.match(chain)
        if pool.num_idle(blocks) > pool.num_spare:
            return Fetched()
        pool.acquire(blocks)
        started_s = time.monotonic()
        num_local = len(blocks)
        nbytes = 0
        try:
            peer = await self.connect(source)
            async with self.leases.hold(source, chain[num_local:]) as (spans, held):
                num_wanted = len(spans.offset)
                num_missing = len(chain) - num_local - num_wanted
                if 0 < num_wanted <= pool.num_spare:
                    blocks += pool.allocate(num_wanted)
                    with held.within(self._deadline_s) as limit_s:
                        report = await self.read(peer, spans, 0, blocks[num_local:], deadline_s=limit_s)
                    nbytes = report.nbytes
        except BaseException:
            pool.release(blocks)
            raise
        for i in range(num_local, len(blocks)):
            blocks[i] = pool.seal(blocks[i], chain[i], chain[i - 1] if i else None)
        return Fetched(blocks, len(blocks) - num_local, num_missing, nbytes, time.monotonic() - started_s)

    async def fill_whole(
        self, source: node_pb2.KvAddress, chain: Sequence[BlockKey], block_ids: Sequence[int]
    ) -> bool:
        """Read a chain that is of use only as a whole, such as an adapter, into allocated blocks. Return
        whether ``source`` has it and it was read; their bytes are undefined otherwise."""
        try:
            peer = await self.connect(source)
            async with self.leases.hold(source, chain) as (spans, held):
                if len(spans.offset) < len(chain):
                    return False
                with held.within(self._deadline_s) as limit_s:
                    await self.read(peer, spans, 0, block_ids, deadline_s=limit_s)
        except (NodeUnavailable, RemoteError, TransferError, PeerIncompatible) as error:
            log.warning("%d blocks were not read from node %s: %s", len(chain), source.node_id, error)
            return False
        return True
