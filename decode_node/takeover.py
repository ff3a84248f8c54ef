"""Takeover of a request from a prefill node or from another decode node: follow, reserve, read, seal."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import grpc.aio
import numpy as np

from moonpool.decode_node.departures import STANDS_STILL_S
from moonpool.engine.batching.sequence import Sequence
from moonpool.engine.engine import Engine
from moonpool.engine.errors import OutOfBlocks
from moonpool.engine.prefix_cache.peer_exchange import KvSource, PeerExchange
from moonpool.engine.prefix_cache.store import USE_DELAY_S, NodeStore
from moonpool.kvstore.blocks.tier import Tier
from moonpool.kvstore.grants.held import HeldGrant, holders_clock
from moonpool.protos import node_pb2, node_pb2_grpc
from moonpool.runtime import rpc
from moonpool.runtime.errors import MoonpoolError
from moonpool.runtime.failures import FailureClass

# A decode node is asked to stop a request when at most so many blocks are left to read.
_REST_BLOCKS = 2
# Clocks may run apart by this part of ``STANDS_STILL_S``.
_DRIFT = 0.01


class HandoverBroken(MoonpoolError):
    """The source ended its stream before the last block."""

    failure = FailureClass.TRANSFER

    def __init__(self, source: str = "prefill") -> None:
        super().__init__(f"the {source} node ended its stream before the last block")


class StoodStillTooLong(MoonpoolError):
    """The last blocks were not read before the source went on with the request."""

    failure = FailureClass.TRANSFER

    def __init__(self, took_s: float) -> None:
        super().__init__(
            f"the last blocks took {took_s:.3f} s; after {STANDS_STILL_S:g} s the source goes on"
        )


@dataclass(frozen=True, slots=True)
class Source:
    """The node that has the request. ``decodes``: as ``attempt``, until it is told to stop."""

    address: str
    attempt: int
    decodes: bool = False

    @classmethod
    def of(cls, request: node_pb2.DecodeRequest) -> Source:
        attempt = request.from_attempt if request.migrates else request.work.attempt
        return cls(request.prefill_address, attempt, request.migrates)


@dataclass(slots=True)
class Taken:
    """``finished``: the prefill's token ended the request. ``stream``: of a decode node, which keeps the
    request for as long as it is open."""

    finished: bool
    received: node_pb2.KvReceived
    stream: grpc.aio.Call | None = None


@dataclass(slots=True)
class _Reading:
    """One sequence on its way here."""

    engine: Engine
    exchange: PeerExchange
    sequence: Sequence
    source: Source
    asked_s: float  # when its blocks were asked for
    deadline_s: float
    received: node_pb2.KvReceived = field(default_factory=node_pb2.KvReceived)
    stopped_s: float = 0.0  # when the source was asked to stop; 0: not yet


async def take_over(
    engine: Engine,
    exchange: PeerExchange,
    store: NodeStore,
    sequence: Sequence,
    source: Source,
    *,
    deadline_s: float,
    follower: str,
) -> Taken:
    """Fill the sequence's blocks from ``source`` while it computes or decodes them.

    Unless it is finished, the sequence has the source's tokens appended and is ready for ``engine.add``. The
    caller releases its blocks, after errors, too, and cancels ``stream``.

    Raises:
        NodeUnavailable, RemoteError, HandoverBroken: the source ended or aborted the request.
        TransferError, PeerIncompatible: the blocks could not be read, or not under their grant.
        OutOfBlocks, StoodStillTooLong: a decode node goes on with the request.
        SequenceTooLong, EngineClosed: from the reservation.
    """
    channel = exchange.channel(source.address)
    follow = (
        node_pb2_grpc.DecodeNodeStub(channel).FollowDecode
        if source.decodes
        else node_pb2_grpc.PrefillNodeStub(channel).Follow
    )
    reading = _Reading(engine, exchange, sequence, source, holders_clock(), deadline_s)
    # Called early, so that the source knows of its follower.
    call = follow(
        node_pb2.FollowRequest(
            request_id=sequence.request_id,
            attempt=source.attempt,
            follower=follower,
            num_tokens=sequence.num_tokens if source.decodes else 0,
        ),
        metadata=rpc.request_metadata(),
    )
    chunks = aiter(call)
    first: node_pb2.KvChunk | None = None
    taken: Taken | None = None
    try:
        with engine.expecting(sequence), rpc.node_errors(source.address):
            await _load_prefix(engine, store, sequence)
            first = await anext(chunks, None)
        if first is None:
            raise HandoverBroken("decode" if source.decodes else "prefill")
        await _reserve(reading, first)
        with rpc.node_errors(source.address):
            token = await _read_chunks(reading, first, chunks)
        if token is not None and token.finish_reason != node_pb2.FINISH_NONE:
            taken = Taken(True, reading.received)
        else:
            if token is not None:
                sequence.append(token.token_id)
            taken = Taken(False, reading.received, call if source.decodes else None)
    finally:
        if taken is None or taken.stream is None:
            call.cancel()
        if first is not None:
            # The source keeps the blocks until then, whatever becomes of the call.
            exchange.leases.release(first.source, first.lease_id)
    return taken


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


async def _reserve(reading: _Reading, first: node_pb2.KvChunk) -> None:
    """Reserve after the first chunk, to prevent a deadlock: a prompt without room on its prefill node must
    not reserve the room here that prompts with blocks there wait for."""
    engine, sequence = reading.engine, reading.sequence
    if not reading.source.decodes:
        await engine.reserved(sequence)
    else:
        _append(sequence, first)
        # A request that runs elsewhere waits for no room here.
        if not engine.reserve(sequence):
            raise OutOfBlocks(-(-(sequence.num_tokens + 1) // engine.pool.block_size), engine.pool.num_free)
    reading.received.num_local_blocks = sequence.num_computed_tokens // engine.pool.block_size


async def _read_chunks(
    reading: _Reading, chunk: node_pb2.KvChunk | None, chunks: AsyncIterator[node_pb2.KvChunk]
) -> node_pb2.TokenOut | None:
    """``chunk``: the first one. Return the prefill's token."""
    engine, exchange, sequence = reading.engine, reading.exchange, reading.sequence
    received, asked_s = reading.received, reading.asked_s
    peer: KvSource | None = None
    held: HeldGrant | None = None
    reads: list[tuple[float, node_pb2.Stretch]] = []  # start times and reads
    num_local, is_first = received.num_local_blocks, True
    while chunk is not None:
        if peer is None or held is None:
            peer = await exchange.connect(chunk.source)
            held = HeldGrant(f"node {chunk.source.node_id}", asked_s, chunk.granted_s)
        held.renewed(asked_s, chunk.granted_s)
        if reading.source.decodes and not is_first:
            _append(sequence, chunk)
            if not engine.extend(sequence):
                raise OutOfBlocks(1, engine.pool.num_free)
        is_first = False
        # The first blocks may be local.
        skip = max(num_local - chunk.first_block, 0)
        first, end = chunk.first_block + skip, chunk.first_block + len(chunk.blocks.offset)
        if first < end:
            started_s = time.monotonic()
            block_ids = sequence.block_table[first:end]
            await exchange.leases.prolong(peer.address, chunk.lease_id, held)
            with held.within(reading.deadline_s) as limit_s:
                report = await exchange.read(peer, chunk.blocks, skip, block_ids, deadline_s=limit_s)
            read_s = time.monotonic() - started_s
            num_tokens = len(block_ids) * engine.pool.block_size
            reads.append(
                (started_s, node_pb2.Stretch(seconds=read_s, num_tokens=num_tokens, nbytes=report.nbytes))
            )
            received.seconds += read_s
            received.nbytes += report.nbytes
            received.num_blocks += len(block_ids)
            received.num_last_blocks += len(block_ids) if reading.stopped_s else 0
            received.transport = report.transport
        _check_in_time(reading)
        engine.seal_received(sequence, chunk.num_tokens)
        if chunk.last:
            for began_s, read in reads:
                read.ago_s = time.monotonic() - began_s
                received.reads.append(read)
            return chunk.token if chunk.HasField("token") else None
        await _stop_if_near(reading, chunk.num_tokens)
        chunk = await anext(chunks, None)
    raise HandoverBroken("decode" if reading.source.decodes else "prefill")


def _append(sequence: Sequence, chunk: node_pb2.KvChunk) -> None:
    for token_id in np.frombuffer(chunk.token_ids, "<i4").tolist():
        sequence.append(token_id)


async def _stop_if_near(reading: _Reading, num_tokens: int) -> None:
    """Ask a decode node to stop the request when little is left. ``num_tokens``: with their KV here.

    Raises StoodStillTooLong: it did not answer before it goes on with the request.
    """
    source, sequence = reading.source, reading.sequence
    rest_tokens = sequence.num_tokens - 1 - num_tokens
    if (
        not source.decodes
        or reading.stopped_s
        or rest_tokens >= _REST_BLOCKS * reading.engine.pool.block_size
    ):
        return
    reading.stopped_s = holders_clock()
    stub = node_pb2_grpc.DecodeNodeStub(reading.exchange.channel(source.address))
    request = node_pb2.YieldRequest(request_id=sequence.request_id, attempt=source.attempt)
    try:
        await stub.Yield(request, timeout=STANDS_STILL_S, metadata=rpc.request_metadata())
    except grpc.aio.AioRpcError as error:
        if error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
            raise
        raise StoodStillTooLong(holders_clock() - reading.stopped_s) from error


def _check_in_time(reading: _Reading) -> None:
    """Raises StoodStillTooLong: what was read since the source was asked to stop may have changed since."""
    if not reading.stopped_s:
        return
    took_s = reading.received.stopped_s = holders_clock() - reading.stopped_s
    if took_s > STANDS_STILL_S * (1 - _DRIFT):
        raise StoodStillTooLong(took_s)
