"""Takeover of a prompt from its prefill node: follow, reserve, read, seal."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

from moonpool.engine.batching.sequence import Sequence
from moonpool.engine.engine import Engine
from moonpool.engine.prefix_cache.peer_exchange import KvSource, PeerExchange
from moonpool.engine.prefix_cache.store import USE_DELAY_S, NodeStore
from moonpool.kvstore.blocks.tier import Tier
from moonpool.kvstore.grants.held import HeldGrant, holders_clock
from moonpool.protos import node_pb2, node_pb2_grpc
from moonpool.runtime import rpc
from moonpool.runtime.errors import MoonpoolError


class HandoverBroken(MoonpoolError):
    """The prefill node ended its stream before the last block."""

    def __init__(self) -> None:
        super().__init__("the prefill node ended its stream before the last block")


async def take_over(
    engine: Engine,
    exchange: PeerExchange,
    store: NodeStore,
    sequence: Sequence,
    prefill_address: str,
    *,
    deadline_s: float,
    follower: str,
) -> tuple[bool, node_pb2.KvReceived]:
    """Fill the sequence's blocks from the node at ``prefill_address`` while it computes them.

    Returns whether the first token ended the request, and the reads. Otherwise the sequence has that token
    appended and is ready for ``engine.add``. The caller releases its blocks, after errors, too.

    Raises:
        NodeUnavailable, RemoteError, HandoverBroken: the prefill node ended or aborted the prefill.
        TransferError, PeerIncompatible: the blocks could not be read, or not under their grant.
        SequenceTooLong, EngineClosed: from the reservation.
    """
    stub = node_pb2_grpc.PrefillNodeStub(exchange.channel(prefill_address))
    asked_s = holders_clock()
    # Called early, so that the prefill node knows of its follower.
    call = stub.Follow(
        node_pb2.FollowRequest(request_id=sequence.request_id, attempt=sequence.attempt, follower=follower),
        metadata=rpc.request_metadata(),
    )
    chunks = aiter(call)
    first: node_pb2.KvChunk | None = None
    try:
        with engine.expecting(sequence), rpc.node_errors(prefill_address):
            await _load_prefix(engine, store, sequence)
            first = await anext(chunks, None)
        if first is None:
            raise HandoverBroken
        # Reserve after the first chunk, to prevent a deadlock: a prompt without room on its prefill node must
        # not reserve the room here that prompts with blocks there wait for.
        await engine.reserved(sequence)
        num_local = sequence.num_computed_tokens // engine.pool.block_size
        received = node_pb2.KvReceived(num_local_blocks=num_local)
        with rpc.node_errors(prefill_address):
            token = await _read_chunks(
                engine, exchange, sequence, first, chunks, asked_s, received, deadline_s
            )
    finally:
        call.cancel()
        if first is not None:
            # The prefill node keeps the blocks until then, whatever becomes of the call.
            exchange.leases.release(first.source, first.lease_id)
    if token.finish_reason != node_pb2.FINISH_NONE:
        return True, received
    sequence.append(token.token_id)
    return False, received


async def _load_prefix(engine: Engine, store: NodeStore, sequence: Sequence) -> None:
    """Load the prompt's blocks in local host memory into the pool's cache, to spare their transfer."""
    pool = engine.pool
    num_blocks = sequence.num_tokens // pool.block_size
    sequence.hash_blocks(pool.block_size, num_blocks)
    chain = sequence.keys[:num_blocks]
    tiers = store.tiers.match(chain)
    asyncio.get_running_loop().call_later(USE_DELAY_S, store.tiers.use, chain, tiers)
    loaded = await store.loader.load(chain, tiers, slowest=Tier.HOST)
    pool.release(loaded.block_ids)


async def _read_chunks(
    engine: Engine,
    exchange: PeerExchange,
    sequence: Sequence,
    chunk: node_pb2.KvChunk | None,
    chunks: AsyncIterator[node_pb2.KvChunk],
    asked_s: float,
    received: node_pb2.KvReceived,
    deadline_s: float,
) -> node_pb2.TokenOut:
    """``chunk``: the first one. ``asked_s``: when they were asked for."""
    peer: KvSource | None = None
    held: HeldGrant | None = None
    reads: list[tuple[float, node_pb2.Stretch]] = []  # start times and reads
    num_local = received.num_local_blocks
    while chunk is not None:
        if peer is None or held is None:
            peer = await exchange.connect(chunk.source)
            held = HeldGrant(f"node {chunk.source.node_id}", asked_s, chunk.granted_s)
        held.renewed(asked_s, chunk.granted_s)
        # The first blocks may be local.
        skip = max(num_local - chunk.first_block, 0)
        first, end = chunk.first_block + skip, chunk.first_block + len(chunk.blocks.offset)
        if first < end:
            started_s = time.monotonic()
            block_ids = sequence.block_table[first:end]
            await exchange.leases.prolong(peer.address, chunk.lease_id, held)
            with held.within(deadline_s) as limit_s:
                report = await exchange.read(peer, chunk.blocks, skip, block_ids, deadline_s=limit_s)
            read_s = time.monotonic() - started_s
            num_tokens = len(block_ids) * engine.pool.block_size
            reads.append(
                (started_s, node_pb2.Stretch(seconds=read_s, num_tokens=num_tokens, nbytes=report.nbytes))
            )
            received.seconds += read_s
            received.nbytes += report.nbytes
            received.num_blocks += len(block_ids)
            received.transport = report.transport
        engine.seal_received(sequence, chunk.num_tokens)
        if chunk.last:
            for began_s, read in reads:
                read.ago_s = time.monotonic() - began_s
                received.reads.append(read)
            return chunk.token
        chunk = await anext(chunks, None)
    raise HandoverBroken
