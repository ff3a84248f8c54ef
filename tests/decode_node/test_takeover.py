"""Taking prompts over while the prefill node's room and ours are both scarce."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
import pytest

from moonpool.decode_node import takeover
from moonpool.decode_node.takeover import HandoverBroken, Source, StoodStillTooLong, take_over
from moonpool.engine.batching.sequence import Sequence
from moonpool.engine.prefix_cache.store import NodeStore
from moonpool.protos import node_pb2, node_pb2_grpc
from moonpool.runtime import rpc
from moonpool.runtime.config.options import Config, HostTierOptions, StoreOptions
from tests.engine.conftest import make_checkpoint
from tests.engine.ranks.test_handover import Side, prompt, side

__all__ = ["make_checkpoint"]

BLOCK_SIZE = 8
NUM_TOKENS = 12 * BLOCK_SIZE  # of a prompt


class Prefills(node_pb2_grpc.PrefillNodeServicer):
    """A prefill node that is told when a prompt is done; its blocks are with the follower already."""

    def __init__(self) -> None:
        self.followed: dict[str, asyncio.Event] = defaultdict(asyncio.Event)
        self.done: dict[str, asyncio.Event] = defaultdict(asyncio.Event)
        self.source = node_pb2.KvAddress()

    async def Follow(
        self, request: node_pb2.FollowRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[node_pb2.KvChunk]:
        self.followed[request.request_id].set()
        await self.done[request.request_id].wait()
        if request.request_id == "broken":
            return
        yield node_pb2.KvChunk(
            num_tokens=NUM_TOKENS,
            last=True,
            token=node_pb2.TokenOut(token_id=7),
            source=self.source,
            granted_s=60,
        )


class Busy(node_pb2_grpc.DecodeNodeServicer):
    """A decode node that does not come to answering."""

    async def Yield(
        self, request: node_pb2.YieldRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> node_pb2.YieldReply:
        await asyncio.Event().wait()
        return node_pb2.YieldReply()


class Taker:
    """A decode node's pool with room for one and a half prompts."""

    def __init__(self, here: Side, store: NodeStore, prefills: Prefills, address: str) -> None:
        self.engine = here.memory.engine
        self.prefills = prefills
        self._here, self._store, self._address = here, store, address

    def begin(self, name: str) -> tuple[Sequence, asyncio.Task[Any]]:
        seed = sum(name.encode())
        sequence = self._here.driver.sequence(prompt(seed, NUM_TOKENS), request_id=name, max_tokens=4)
        return sequence, asyncio.create_task(self._take(sequence))

    async def _take(self, sequence: Sequence) -> Any:
        return await take_over(
            self.engine,
            self._here.exchange,
            self._store,
            sequence,
            Source(self._address, sequence.attempt),
            deadline_s=10,
            follower="here",
        )


@pytest.fixture
async def taker(make_checkpoint) -> AsyncIterator[Taker]:
    path = make_checkpoint("llama").path
    layout_nbytes = 3 * 2 * 2 * BLOCK_SIZE * 16 * 4
    prefills = Prefills()
    async with side(path, "decode", 1, 1, block_size=BLOCK_SIZE, pool_nbytes=18 * layout_nbytes) as here:
        prefills.source = here.address
        config = Config(store=StoreOptions(host=HostTierOptions(capacity_nbytes=1 << 20)))
        memory = here.memory
        store = await NodeStore.open(config, "x", here.agent, memory.engine, memory.blocks, lambda *_: None)
        add = node_pb2_grpc.add_PrefillNodeServicer_to_server
        server, port = await rpc.serve([(add, prefills)], "127.0.0.1", 0)
        assert memory.engine.pool.num_blocks == 18
        yield Taker(here, store, prefills, f"127.0.0.1:{port}")
        memory.engine.pool.check_integrity()
        await here.exchange.close()
        await server.stop(None)
        await store.close(0)


async def test_a_prompt_that_is_not_computed_yet_keeps_no_room_from_one_that_is(taker: Taker) -> None:
    """Else its prefill might wait for the other's blocks there, and the other for its blocks here."""
    prefills, engine = taker.prefills, taker.engine
    later, taking_later = taker.begin("later")
    await prefills.followed["later"].wait()
    sooner, taking_sooner = taker.begin("sooner")
    await prefills.followed["sooner"].wait()
    # Whoever asks how much room there is hears of both.
    assert engine.stats().num_free_blocks == 18
    assert engine.stats().num_available_blocks == 0
    prefills.done["sooner"].set()
    async with asyncio.timeout(60):
        taken = await taking_sooner
    assert not taken.finished
    assert len(sooner.block_table) == 13
    assert engine.stats().num_available_blocks == 0
    assert not later.block_table
    # There is no room for the other until this one has decoded.
    prefills.done["later"].set()
    done, _ = await asyncio.wait((taking_later,), timeout=0.1)
    assert not done
    engine.release(sooner)
    async with asyncio.timeout(60):
        await taking_later
    assert len(later.block_table) == 13
    engine.release(later)
    assert engine.stats().num_available_blocks == 18


async def test_a_stream_that_ends_early_or_is_given_up_leaves_nothing(taker: Taker) -> None:
    prefills, engine = taker.prefills, taker.engine
    prefills.done["broken"].set()
    _, taking = taker.begin("broken")
    with pytest.raises(HandoverBroken):
        await taking
    _, taking = taker.begin("given up")
    await prefills.followed["given up"].wait()
    taking.cancel()
    await asyncio.wait((taking,))
    stats = engine.stats()
    assert stats.num_available_blocks == stats.num_free_blocks == 18


async def test_a_source_that_answers_too_late_goes_on_and_is_not_called_dead(
    taker: Taker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(takeover, "STANDS_STILL_S", 0.1)
    add = node_pb2_grpc.add_DecodeNodeServicer_to_server
    server, port = await rpc.serve([(add, Busy())], "127.0.0.1", 0)
    sequence = taker._here.driver.sequence(prompt(1, NUM_TOKENS), request_id="moves", max_tokens=4)
    source = Source(f"127.0.0.1:{port}", 0, decodes=True)
    reading = takeover._Reading(taker.engine, taker._here.exchange, sequence, source, 0.0, 10.0)
    with pytest.raises(StoodStillTooLong, match="the source goes on"):
        await takeover._stop_if_near(reading, NUM_TOKENS - 1)
    await server.stop(None)
