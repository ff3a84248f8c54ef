"""Events over real ZeroMQ sockets: an engine's reach the index, ours reach who subscribes, holes are seen."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import pytest
import zmq
import zmq.asyncio

from moonpool.kvstore.blocks.keys import chain
from moonpool.kvstore.blocks.tier import Tier
from moonpool.kvstore.events import metrics
from moonpool.kvstore.events.curve import EndpointInvalid
from moonpool.kvstore.events.external_engine import ExternalNode
from moonpool.kvstore.events.messages import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    Hash,
    KvEvent,
    decode,
    encode,
)
from moonpool.kvstore.events.publisher import EventPublisher
from moonpool.kvstore.events.subscriber import EventSource
from moonpool.kvstore.index.mirror import IndexMirror
from moonpool.kvstore.index.redis.kv_index import KVIndex
from moonpool.kvstore.index.redis.node_record import EXTERNAL_ROLE, NodeRecord
from moonpool.runtime.config.options import EventsOptions, IndexOptions

ROOT = b"r" * 16
BLOCK = 16


class Engine:
    """The publishing side of an engine that is not ours: PUB, and ROUTER for replays of its last batches."""

    def __init__(
        self, history: int = 100, endpoints: tuple[str, str] = ("tcp://127.0.0.1:*", "tcp://127.0.0.1:*")
    ) -> None:
        self.context = zmq.asyncio.Context()
        self.pub = self.context.socket(zmq.XPUB)
        self.router = self.context.socket(zmq.ROUTER)
        self.pub.bind(endpoints[0])
        self.router.bind(endpoints[1])
        self.endpoint = self.pub.get_string(zmq.LAST_ENDPOINT)
        self.replay_endpoint = self.router.get_string(zmq.LAST_ENDPOINT)
        self.sent: list[tuple[int, bytes]] = []
        self.history = history
        self.seq = 0
        self.replaying = asyncio.create_task(self._replay())

    async def subscribed(self) -> None:
        assert (await self.pub.recv())[:1] == b"\x01"

    async def send(self, *events: KvEvent, lost: bool = False) -> None:
        payload = encode(EventBatch(time.time(), events))
        self.sent = [*self.sent, (self.seq, payload)][-self.history :] if self.history else []
        if not lost:
            await self.pub.send_multipart([b"kv@pod@m", self.seq.to_bytes(8, "big"), payload])
        self.seq += 1

    def restart(self) -> None:
        """Begin again with other numbers and an empty history. The connection stays, as behind a proxy."""
        self.sent, self.seq = [], 0

    async def reborn(self) -> Engine:
        """Another process at the same addresses; subscribers have lost their connection."""
        self.close()
        engine = Engine(self.history, (self.endpoint, self.replay_endpoint))
        await engine.subscribed()
        return engine

    async def _replay(self) -> None:
        while True:
            client, _, start = await self.router.recv_multipart()
            for seq, payload in self.sent:
                if seq >= int.from_bytes(start, "big"):
                    await self.router.send_multipart([client, b"", b"", seq.to_bytes(8, "big"), payload])
            await self.router.send_multipart([client, b"", b"", (-1).to_bytes(8, "big", signed=True), b""])

    def close(self) -> None:
        self.replaying.cancel()
        self.context.destroy(linger=0)


@pytest.fixture
async def engine() -> AsyncIterator[Engine]:
    engine = Engine()
    yield engine
    engine.close()


@pytest.fixture
async def mirror(index: KVIndex) -> AsyncIterator[IndexMirror]:
    mirror = IndexMirror(index, lease_ttl_s=30, tick_s=0.02)
    await mirror.start()
    yield mirror
    await mirror.close()


class Following:
    """An external node that follows ``engine``."""

    def __init__(self, index: KVIndex, engine: Engine, replay: bool = True, block_size: int = BLOCK) -> None:
        options = IndexOptions(lease_ttl_s=30, publish_interval_s=0.001)
        self.node = ExternalNode(
            index,
            NodeRecord("vllm-0", 1, EXTERNAL_ROLE),
            options,
            block_size=block_size,
            root_of=lambda lora: ROOT,
        )
        replay_endpoint = engine.replay_endpoint if replay else ""
        self.source = EventSource(engine.endpoint, replay_endpoint, topic="kv@", replay_timeout_s=60)

    async def __aenter__(self) -> Following:
        await self.node.publisher.start()
        self.task = asyncio.create_task(self.node.follow(self.source.batches()))
        return self

    async def __aexit__(self, *_: object) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        self.source.close()
        await self.node.publisher.close()


async def eventually(holds: Callable[[], object]) -> None:
    while not holds():  # noqa: ASYNC110 (another thread's sockets decide)
        await asyncio.sleep(0.002)


def tokens(count: int, first: int = 0) -> list[int]:
    return list(range(first, first + count * BLOCK))


def ours(token_ids: list[int]) -> Any:
    return chain(ROOT, np.array(token_ids, np.int32), BLOCK)


async def test_an_engines_blocks_are_found_by_their_tokens(
    index: KVIndex, mirror: IndexMirror, engine: Engine
) -> None:
    prompt = tokens(4)
    async with Following(index, engine) as following:
        await engine.subscribed()
        # Hashes of either kind; the second event goes on where the first ended.
        await engine.send(BlockStored([11, b"twelve"], None, prompt[: 2 * BLOCK], BLOCK, medium="GPU"))
        await engine.send(BlockStored([13, 14], b"twelve", prompt[2 * BLOCK :], BLOCK, medium="GPU"))
        await eventually(lambda: mirror.longest_prefix(ours(prompt)) == {"vllm-0": 4})
        assert mirror.nodes["vllm-0"].role == EXTERNAL_ROLE
        await engine.send(BlockStored([14], 13, prompt[3 * BLOCK :], BLOCK, medium="CPU"))
        await engine.send(BlockRemoved([14], "GPU"))
        await eventually(lambda: mirror.tier_of("vllm-0", ours(prompt)[3]) is Tier.HOST)
        await engine.send(BlockRemoved([14], "CPU"), BlockRemoved([13], "GPU"))
        await eventually(lambda: mirror.longest_prefix(ours(prompt)) == {"vllm-0": 2})
        await engine.send(AllBlocksCleared())
        await eventually(lambda: mirror.longest_prefix(ours(prompt)) == {})
        assert following.node._blocks == {}


async def test_larger_blocks_are_found_by_ours(index: KVIndex, mirror: IndexMirror, engine: Engine) -> None:
    prompt = tokens(8)
    async with Following(index, engine):
        await engine.subscribed()
        await engine.send(BlockStored([1, 2], None, prompt, 4 * BLOCK))
        await eventually(lambda: mirror.longest_prefix(ours(prompt)) == {"vllm-0": 8})
        await engine.send(BlockRemoved([2]))
        await eventually(lambda: mirror.longest_prefix(ours(prompt)) == {"vllm-0": 4})


async def test_what_cannot_be_found_by_tokens_is_counted_and_left_out(
    index: KVIndex, mirror: IndexMirror, engine: Engine
) -> None:
    def skipped(reason: str) -> float:
        return float(metrics.skipped_blocks.labels(reason)._value.get())

    before = {reason: skipped(reason) for reason in ("orphan", "extra", "group", "size")}
    async with Following(index, engine) as following:
        apply = following.node.apply
        apply(BlockStored([2], 1, tokens(1), BLOCK))
        apply(BlockStored([3], None, tokens(1), BLOCK, extra_keys=[["a salt"]]))
        apply(BlockStored([4], None, tokens(1), BLOCK, group_idx=1, kv_cache_spec_kind="sliding_window"))
        apply(BlockStored([5], None, tokens(1), BLOCK - 1))
        apply(BlockStored([6], None, tokens(1), BLOCK, lora_id=1))  # of engines that do not name adapters
        apply(BlockRemoved([99]))
        assert following.node._blocks == {}
    counted = {reason: skipped(reason) - count for reason, count in before.items()}
    assert counted == {"orphan": 1, "extra": 2, "group": 1, "size": 1}


async def test_missed_batches_are_asked_for(index: KVIndex, mirror: IndexMirror, engine: Engine) -> None:
    prompt = tokens(4)
    # Before anybody subscribed, and in between.
    await engine.send(BlockStored([1], None, prompt[:BLOCK], BLOCK))
    async with Following(index, engine):
        await engine.subscribed()
        await eventually(lambda: mirror.longest_prefix(ours(prompt)) == {"vllm-0": 1})
        await engine.send(BlockStored([2], 1, prompt[BLOCK : 2 * BLOCK], BLOCK), lost=True)
        await engine.send(BlockStored([3], 2, prompt[2 * BLOCK : 3 * BLOCK], BLOCK), lost=True)
        await engine.send(BlockStored([4], 3, prompt[3 * BLOCK :], BLOCK))
        await eventually(lambda: mirror.longest_prefix(ours(prompt)) == {"vllm-0": 4})


@pytest.mark.parametrize("replay", [True, False])
async def test_a_gap_that_cannot_be_replayed_forgets_the_engine(
    index: KVIndex, mirror: IndexMirror, engine: Engine, replay: bool
) -> None:
    engine.history = 1
    prompt = tokens(2)
    async with Following(index, engine, replay=replay):
        await engine.subscribed()
        await engine.send(BlockStored([1], None, prompt[:BLOCK], BLOCK))
        await eventually(lambda: mirror.longest_prefix(ours(prompt)) == {"vllm-0": 1})
        await engine.send(BlockRemoved([1]), lost=True)
        await engine.send(BlockStored([7], None, tokens(1, first=500), BLOCK))
        await eventually(lambda: mirror.longest_prefix(ours(tokens(1, first=500))) == {"vllm-0": 1})
        assert mirror.longest_prefix(ours(prompt)) == {}


def block(number: int) -> list[int]:
    return tokens(1, first=number * 100)


async def sent(engine: Engine, *numbers: int, lost: bool = False) -> None:
    """A batch for each: it stores a block of that number."""
    for number in numbers:
        await engine.send(BlockStored([number], None, block(number), BLOCK), lost=lost)


def found(mirror: IndexMirror) -> set[int]:
    return {number for number in range(20) if mirror.longest_prefix(ours(block(number)))}


async def test_a_batch_that_cannot_be_read_forgets_the_engine(
    index: KVIndex, mirror: IndexMirror, engine: Engine
) -> None:
    """It may have removed any block."""
    async with Following(index, engine):
        await engine.subscribed()
        await sent(engine, 1)
        await eventually(lambda: found(mirror) == {1})
        await engine.pub.send_multipart([b"kv@pod@m", engine.seq.to_bytes(8, "big"), b"no MessagePack"])
        engine.seq += 1
        await sent(engine, 2)
        await eventually(lambda: 2 in found(mirror))
        assert found(mirror) == {2}


@pytest.mark.parametrize("replay", [True, False])
@pytest.mark.parametrize("num_missed", [0, 1, 2, 5])
async def test_an_engine_that_begins_anew_is_forgotten(
    index: KVIndex, mirror: IndexMirror, engine: Engine, replay: bool, num_missed: int
) -> None:
    """However many of its first batches are missed: fewer than there were before, or more."""
    async with Following(index, engine, replay=replay):
        await engine.subscribed()
        await sent(engine, 1, 2, 3)
        await eventually(lambda: found(mirror) == {1, 2, 3})
        engine.restart()
        await sent(engine, *range(4, 4 + num_missed), lost=True)
        await sent(engine, 19)
        new = {19, *range(4, 4 + num_missed)} if replay else {19}
        await eventually(lambda: found(mirror) == new)


@pytest.mark.parametrize("replay", [True, False])
async def test_a_new_process_with_the_next_number_is_another_engine(
    index: KVIndex, mirror: IndexMirror, engine: Engine, replay: bool
) -> None:
    async with Following(index, engine, replay=replay):
        await engine.subscribed()
        await sent(engine, 1)
        await eventually(lambda: found(mirror) == {1})
        reborn = await engine.reborn()
        try:
            await sent(reborn, 2, lost=True)
            await sent(reborn, 3)
            await eventually(lambda: found(mirror) == ({2, 3} if replay else {3}))
        finally:
            reborn.close()


async def test_a_connection_that_broke_costs_nothing_with_a_replay(engine: Engine) -> None:
    source = EventSource(engine.endpoint, engine.replay_endpoint, replay_timeout_s=60)
    got: list[list[Hash]] = []

    async def read() -> None:
        async for batch in source.batches():
            assert isinstance(batch, EventBatch), "nothing was lost"
            got.extend(list(event.block_hashes) for event in batch.events)  # type: ignore[union-attr]

    reading = asyncio.create_task(read())
    await engine.subscribed()
    await sent(engine, 1, 2)
    await eventually(lambda: got == [[1], [2]])
    again = await engine.reborn()
    again.sent, again.seq = engine.sent, engine.seq  # as if it were the same process
    await sent(again, 3, lost=True)
    await sent(again, 4)
    await eventually(lambda: reading.done() or got == [[1], [2], [3], [4]])
    assert not reading.done()
    reading.cancel()
    await asyncio.wait((reading,))
    source.close()
    again.close()


async def test_batches_that_were_replayed_are_not_taken_for_a_restart(engine: Engine) -> None:
    source = EventSource(engine.endpoint, engine.replay_endpoint, replay_timeout_s=60)
    await engine.subscribed()
    # Both in the replay and in the socket's queue.
    await sent(engine, 1, 2, 3)
    got = []
    async for batch in source.batches():
        got.append(batch)
        if len(got) == 3:
            await sent(engine, 4)
        if len(got) == 4:
            break
    assert [event.block_hashes for batch in got for event in batch.events] == [[1], [2], [3], [4]]  # type: ignore
    source.close()


async def test_blocks_in_storage_of_others_are_not_the_engines(
    index: KVIndex, mirror: IndexMirror, engine: Engine
) -> None:
    before = float(metrics.skipped_blocks.labels("remote")._value.get())

    def stored(number: int, locality: str | None) -> BlockStored:
        return BlockStored([number], None, block(number), BLOCK, medium="STORAGE", locality=locality)

    async with Following(index, engine):
        await engine.subscribed()
        await engine.send(stored(1, "LOCAL"), stored(2, "REMOTE"), stored(3, None), stored(4, "ELSEWHERE"))
        await eventually(lambda: found(mirror) == {1, 3})
        assert metrics.skipped_blocks.labels("remote")._value.get() - before == 2
        # It is dropped from the engine's memory, and stays in the storage of others; and the reverse.
        await engine.send(BlockStored([5], None, block(5), BLOCK, medium="GPU"), stored(5, "REMOTE"))
        await engine.send(BlockRemoved([1], "STORAGE", locality="REMOTE"), BlockRemoved([5], "GPU"))
        await engine.send(BlockStored([6], None, block(6), BLOCK, medium="GPU"))
        await eventually(lambda: found(mirror) == {1, 3, 6})


async def test_our_events_are_followed_by_our_own_reader(index: KVIndex, mirror: IndexMirror) -> None:
    """The circle: a node's listener, real sockets, and back into an index: the same keys."""
    options = EventsOptions(
        zmq_endpoint="tcp://127.0.0.1:*",
        replay_endpoint="tcp://127.0.0.1:*",
        topic="kv@p@m",
        interval_s=0.001,
    )
    publisher = EventPublisher(options, BLOCK, rank=3)
    await publisher.start()
    prompt = tokens(5)
    keys = ours(prompt)
    publisher.describe(keys, np.array(prompt, np.int32))
    for key in keys[:4]:
        publisher.stored(key, Tier.POOL)
    publisher.stored(ours(tokens(1, first=999))[0], Tier.POOL)  # its tokens were never told
    node = ExternalNode(
        index,
        NodeRecord("copy", 1, EXTERNAL_ROLE),
        IndexOptions(lease_ttl_s=30, publish_interval_s=0.001),
        block_size=BLOCK,
        root_of=lambda lora: ROOT,
    )
    source = EventSource(publisher.endpoint, publisher.replay_endpoint, replay_timeout_s=60)
    await node.publisher.start()
    task = asyncio.create_task(node.follow(source.batches()))
    try:
        await eventually(lambda: mirror.longest_prefix(keys) == {"copy": 4})
        publisher.stored(keys[4], Tier.POOL)
        publisher.stored(keys[3], Tier.HOST)
        await eventually(lambda: mirror.tier_of("copy", keys[3]) is Tier.HOST)
        await eventually(lambda: mirror.longest_prefix(keys) == {"copy": 5})
        publisher.removed(keys[4])
        await eventually(lambda: mirror.longest_prefix(keys) == {"copy": 4})
        assert mirror.num_blocks_of("copy") == 4
        assert {decode(payload).data_parallel_rank for _, payload in publisher._sent} == {3}
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        source.close()
        await node.publisher.close()
        await publisher.close()


@pytest.mark.slow
async def test_a_long_replay_is_complete() -> None:
    """More batches than ZeroMQ's queues, and more bytes than the sockets between them, hold."""
    num_batches, size = 3_000, 4_096
    options = EventsOptions(
        zmq_endpoint="tcp://127.0.0.1:*",
        replay_endpoint="tcp://127.0.0.1:*",
        interval_s=1e-6,
        replay_batches=num_batches,
    )
    publisher = EventPublisher(options, size)
    await publisher.start()
    for number in range(num_batches):
        prompt = np.full(size, number + 100_000, np.int32)
        keys = chain(ROOT, prompt, size)
        publisher.describe(keys, prompt)
        publisher.stored(keys[0], Tier.POOL)
        await eventually(lambda: not publisher._pending)
    source = EventSource(publisher.endpoint, publisher.replay_endpoint, replay_timeout_s=60)
    got = 0
    async for batch in source.batches():
        assert isinstance(batch, EventBatch)
        got += 1
        if got == num_batches:
            break
    source.close()
    await publisher.close()


async def test_addresses_that_make_no_sense_are_refused_by_name() -> None:
    with pytest.raises(EndpointInvalid, match="nowhere"):
        EventSource("nowhere")
    publisher = EventPublisher(EventsOptions(zmq_endpoint="tcp://256.1.1.1:x"), BLOCK)
    with pytest.raises(EndpointInvalid, match="256"):
        await publisher.start()
