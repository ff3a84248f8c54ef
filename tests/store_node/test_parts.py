"""A store node copies blocks that the ranks of a node hold in parts: whole, verified, or not at all."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc.aio
import numpy as np
import pytest

from moonpool.kvstore.blocks import keys as block_keys
from moonpool.kvstore.blocks.keys import BlockKey
from moonpool.kvstore.blocks.layout import KVLayout, OpaqueLayout
from moonpool.kvstore.blocks.shards import BlockShard
from moonpool.kvstore.errors import LayoutError
from moonpool.kvstore.remote.peer_leases import RemoteLeases
from moonpool.kvstore.remote.rank_reader import RankRead
from moonpool.kvstore.remote.sharded_reader import RankTarget, ShardedReader, rank_memory
from moonpool.kvstore.store import TieredStore
from moonpool.kvstore.store_node.kv_shelf import KvShelf
from moonpool.protos import node_pb2, node_pb2_grpc
from moonpool.runtime import rpc
from moonpool.runtime.cancellation import outlast
from moonpool.runtime.config.options import StoreOptions, TransferOptions
from moonpool.transfer import ChecksumMismatch, GrantLapsed, TransferAgent, TransferError, checksum
from tests.transfer.conftest import RemotePeer, StartPeer, shared_peer, start_peer
from tests.transfer.peer_process import pattern

__all__ = ["shared_peer", "start_peer"]

LAYOUT = KVLayout(num_layers=4, num_kv_heads=4, block_size=16, head_dim=32, dtype="float32")
NUM_BLOCKS = 12
KEYS = [BlockKey(bytes([i]) * 16) for i in range(NUM_BLOCKS)]


def cut(layers: Sequence[range], heads: Sequence[range]) -> list[BlockShard]:
    return [BlockShard(some, held) for some in layers for held in heads]


PLANS = {
    "tp 2": cut([range(4)], [range(2), range(2, 4)]),
    "pp 2": cut([range(1), range(1, 4)], [range(4)]),
    "tp 2 × pp 2": cut([range(2), range(2, 4)], [range(2), range(2, 4)]),
    # Every rank has whole blocks, every second one.
    "cp 2": cut([range(4)] * 2, [range(4)]),
}


class Source(node_pb2_grpc.NodeServicer):
    """A node of several ranks, each a process with its part of ``NUM_BLOCKS`` blocks, all of them leased."""

    def __init__(self, shards: list[BlockShard], ranks: list[RemotePeer]) -> None:
        self.shards = shards
        self.ranks = ranks
        self.address = node_pb2.KvAddress()
        self.blocks = np.zeros((NUM_BLOCKS, *LAYOUT.shape), np.float32)
        self.released = asyncio.Event()
        self.granted_s, self.late_s = 60.0, 0.0

    async def start(self, address: str) -> Source:
        ranks = []
        cp_ranks = [self.shards[:i].count(shard) for i, shard in enumerate(self.shards)]
        cp_size = 1 + max(cp_ranks)
        for seed, (shard, peer) in enumerate(zip(self.shards, self.ranks, strict=True)):
            cp_rank, nbytes = cp_ranks[seed], NUM_BLOCKS // cp_size * shard.block_nbytes(LAYOUT)
            region = (await peer.do("allocate", nbytes=nbytes, seed=seed))["region"]
            held = self.blocks[cp_rank::cp_size, shard.layers.start : shard.layers.stop][
                :, :, :, shard.heads.start : shard.heads.stop
            ]
            held[:] = pattern(nbytes, seed).view(np.float32).reshape(held.shape)
            ranks.append(rank_memory(shard, peer.descriptor.pack(), region, cp_rank))
        self.address.CopyFrom(
            node_pb2.KvAddress(
                node_id="source",
                epoch=1,
                rpc_address=address,
                agent=ranks[0].agent,
                layout_fingerprint=LAYOUT.fingerprint,
                block_nbytes=LAYOUT.block_nbytes,
                layout=str(LAYOUT),
                ranks=ranks,
            )
        )
        return self

    async def Lease(
        self, request: node_pb2.LeaseRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> node_pb2.LeaseReply:
        await asyncio.sleep(self.late_s)
        numbers = [KEYS.index(key) for key in block_keys.unpack(request.keys)]
        spans = node_pb2.BlockSpans(
            region=[self.address.ranks[0].region] * len(numbers),
            offset=[number * LAYOUT.block_nbytes for number in numbers],
            checksum=[checksum(self.blocks[number].tobytes()) for number in numbers],
        )
        return node_pb2.LeaseReply(lease_id=1, epoch=1, blocks=spans, granted_s=self.granted_s)

    async def Release(
        self, request: node_pb2.ReleaseRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> node_pb2.ReleaseReply:
        self.released.set()
        return node_pb2.ReleaseReply()


@asynccontextmanager
async def shelf_of(*transports: str) -> AsyncIterator[KvShelf]:
    options = StoreOptions()
    capacity_nbytes = 2 * NUM_BLOCKS * LAYOUT.block_nbytes
    options = replace(options, host=replace(options.host, capacity_nbytes=capacity_nbytes))
    leases = RemoteLeases(10.0)
    async with await TransferAgent.start(
        TransferOptions(transports=transports), agent_id="store", epoch=1
    ) as agent:
        region = agent.allocate(capacity_nbytes, "kv")

        async def make_store(layout: OpaqueLayout) -> TieredStore:
            return TieredStore(layout, options, region.array)

        shelf = KvShelf("store", region, make_store, agent, leases, deadline_s=10.0)
        try:
            yield shelf
            if shelf.store is not None:
                shelf.store.check_integrity()
        finally:
            await shelf.close(0)
            await leases.close()


@asynccontextmanager
async def serving(shards: list[BlockShard], ranks: list[RemotePeer]) -> AsyncIterator[Source]:
    source = Source(shards, ranks)
    server, port = await rpc.serve([(node_pb2_grpc.add_NodeServicer_to_server, source)], "127.0.0.1", 0)
    try:
        yield await source.start(f"127.0.0.1:{port}")
    finally:
        await server.stop(None)


async def held(shelf: KvShelf) -> list[bytes]:
    """The bytes of the longest prefix that others can read from it."""
    lease, spans = await shelf.lease(KEYS, 10.0, "a test")
    assert shelf.store is not None
    host = shelf.store.host
    found = [host.bytes_of(offset // LAYOUT.block_nbytes).tobytes() for offset in spans.offset]
    assert [checksum(block) for block in found] == list(spans.checksum)
    shelf.release(lease.id)
    return found


# Copied from mapped memory blocks are verified on the way, over a network afterwards.
@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("plan", PLANS)
async def test_blocks_are_whole_here_however_ranks_hold_them(
    shared_peer: StartPeer, plan: str, transport: str
) -> None:
    shards = PLANS[plan]
    ranks = [shared_peer("shm,tcp", epoch=i + 1) for i in range(len(shards))]
    async with serving(shards, ranks) as source, shelf_of(transport) as shelf:
        some = await shelf.replicate(source.address, KEYS[:5])
        assert (some.num_blocks, some.num_read) == (5, 5)
        done = await shelf.replicate(source.address, KEYS)
        assert (done.num_blocks, done.num_read) == (NUM_BLOCKS, NUM_BLOCKS - 5)
        assert await held(shelf) == [block.tobytes() for block in source.blocks]
        await asyncio.wait_for(source.released.wait(), 60)
    for rank in ranks:
        await rank.do("close_regions")


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_a_wrong_byte_of_one_rank_is_no_block(shared_peer: StartPeer, transport: str) -> None:
    shards = PLANS["tp 2"]
    ranks = [shared_peer("shm,tcp", epoch=i + 1) for i in range(len(shards))]
    async with serving(shards, ranks) as source, shelf_of(transport) as shelf:
        region, at = source.address.ranks[1].region, 3 * shards[1].block_nbytes(LAYOUT) + 17
        right = int(pattern(at + 1, 1)[at])
        await ranks[1].do("poke", region=region, offset=at, value=right ^ 1)
        with pytest.raises(ChecksumMismatch):
            await shelf.replicate(source.address, KEYS)
        assert await held(shelf) == []
        await ranks[1].do("poke", region=region, offset=at, value=right)
        assert (await shelf.replicate(source.address, KEYS)).num_blocks == NUM_BLOCKS
        assert await held(shelf) == [block.tobytes() for block in source.blocks]
    for rank in ranks:
        await rank.do("close_regions")


async def test_a_rank_that_dies_meanwhile_leaves_nothing(
    shared_peer: StartPeer, start_peer: StartPeer
) -> None:
    shards = PLANS["tp 2 × pp 2"]
    ranks = [shared_peer("shm,tcp", epoch=i + 1) for i in range(3)]
    victim = start_peer("shm,tcp", epoch=4)
    async with shelf_of("tcp") as shelf:
        async with serving(shards, [*ranks, victim]) as source:
            assert (await shelf.replicate(source.address, KEYS[:2])).num_read == 2
            # Stopped it answers nothing: the read is under way when it dies.
            victim.signal(signal.SIGSTOP)
            reading = asyncio.create_task(shelf.replicate(source.address, KEYS))
            done, _ = await asyncio.wait((reading,), timeout=0.3)
            assert not done
            victim.kill()
            with pytest.raises(TransferError):
                await reading
            assert await held(shelf) == [block.tobytes() for block in source.blocks[:2]]
            assert shelf.store is not None
            shelf.store.check_integrity()
        for rank in ranks:
            await rank.do("close_regions")
        # The node's next life, with other ranks; what was free is free again.
        ranks.append(start_peer("shm,tcp", epoch=5))
        async with serving(shards, ranks) as source:
            assert (await shelf.replicate(source.address, KEYS)).num_read == NUM_BLOCKS - 2
            assert await held(shelf) == [block.tobytes() for block in source.blocks]
    for rank in ranks[:3]:
        await rank.do("close_regions")


class FailingReader:
    async def read(self, request: RankRead) -> str:
        raise TransferError("the rank is gone")


class LastingReader:
    """A read that writes until ``ended``, whatever is cancelled."""

    def __init__(self) -> None:
        self.asked_to_end = asyncio.Event()
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def read(self, request: RankRead) -> str:
        return await outlast(self.ended, self.asked_to_end.set)


async def never_hashed(block_ids: Sequence[int]) -> list[int]:
    raise AssertionError("blocks that were not read have no checksums")


@pytest.mark.parametrize("num_cancels", [0, 1, 2])
async def test_no_read_of_a_failed_copy_goes_on_after_it(num_cancels: int) -> None:
    """Its caller frees the memory that the reads write to."""
    lasting = LastingReader()
    readers = zip(PLANS["tp 2"], (FailingReader(), lasting), strict=True)
    reader = ShardedReader(LAYOUT, [RankTarget(*each) for each in readers], never_hashed)
    source = node_pb2.KvAddress(ranks=[rank_memory(BlockShard.whole(LAYOUT), b"", 0)])
    reading = asyncio.create_task(reader.read(source, [0], [0], [0], deadline_s=10.0))
    await lasting.asked_to_end.wait()
    for _ in range(num_cancels):
        reading.cancel()
        await turns_of_the_loop()
    ended_early = reading.done()
    lasting.ended.set_result("tcp")
    assert not ended_early
    with pytest.raises(asyncio.CancelledError if num_cancels else TransferError):
        await reading


async def turns_of_the_loop() -> None:
    """Enough for a cancellation to end whatever does not outlast it."""
    for _ in range(10):
        await asyncio.sleep(0)


async def test_blocks_read_after_their_lease_are_no_blocks(shared_peer: StartPeer) -> None:
    """The reader has more time than the source granted, and is told so late that none of it is left."""
    shards = PLANS["tp 2"]
    ranks = [shared_peer("shm,tcp", epoch=i + 1) for i in range(len(shards))]
    async with serving(shards, ranks) as source, shelf_of("shm") as shelf:
        source.granted_s = source.late_s = 0.1
        with pytest.raises(GrantLapsed, match=r"node source granted its memory for 0.1 s"):
            await shelf.replicate(source.address, KEYS)
        assert await held(shelf) == []
        source.granted_s, source.late_s = 60.0, 0.0
        assert (await shelf.replicate(source.address, KEYS)).num_read == NUM_BLOCKS


async def test_ranks_that_hold_no_whole_blocks_are_refused_by_name(shared_peer: StartPeer) -> None:
    shards = PLANS["tp 2"]
    ranks = [shared_peer("shm,tcp", epoch=i + 1) for i in range(len(shards))]
    async with serving(shards, ranks) as source, shelf_of("tcp") as shelf:
        source.address.ranks[1].num_layers = 3
        with pytest.raises(LayoutError, match="are not held once each"):
            await shelf.replicate(source.address, KEYS)
        source.address.ranks[1].num_layers = 5
        with pytest.raises(LayoutError, match="have no 5 layers of 4 KV heads"):
            await shelf.replicate(source.address, KEYS)
        assert await held(shelf) == []
    for rank in ranks:
        await rank.do("close_regions")
