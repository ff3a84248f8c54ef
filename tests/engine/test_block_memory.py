"""Blocks between the pool, host memory and peers, where the pool is in main memory and where it is not."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from moonpool.engine.batching.sampling import Sampling
from moonpool.engine.batching.scheduler import Scheduler
from moonpool.engine.batching.sequence import Sequence, State
from moonpool.engine.batching.step_plan import StepEvent, StepOutput, StepPlan
from moonpool.engine.device.device import CpuDevice
from moonpool.engine.device.selection import choose_device
from moonpool.engine.memory.block_bytes import DeviceBytes, HostBytes
from moonpool.engine.memory.block_memory import BlockMemory
from moonpool.engine.memory.block_pool import BlockPool
from moonpool.engine.node.handover import Handover
from moonpool.engine.prefix_cache.store import NodeStore
from moonpool.engine.prefix_cache.tier_loader import Loaded
from moonpool.kvstore.blocks.keys import BlockKey
from moonpool.kvstore.blocks.tier import Tier
from moonpool.kvstore.grants.table import GrantTable
from moonpool.protos import node_pb2
from moonpool.runtime.config.options import Config, HostTierOptions, StoreOptions
from moonpool.transfer import TransferAgent, checksum
from tests.engine.conftest import prompt
from tests.engine.late_device import LateDevice

NUM_BLOCKS = 12
DEVICES = [
    pytest.param(CpuDevice, id="cpu"),
    pytest.param(LateDevice, id="late"),
    pytest.param(partial(choose_device, "cuda"), id="cuda", marks=pytest.mark.gpu),
]


@dataclass
class Node:
    """What a node has of blocks, without its services."""

    driver: Any
    memory: BlockMemory
    store: NodeStore

    async def compute(self, tokens: list[int], n: int = 1) -> list[int]:
        (result,) = await self.driver.run(self.driver.sequence(tokens, max_tokens=n))
        return result.token_ids

    def chain(self, tokens: list[int]) -> list[BlockKey]:
        sequence = self.driver.sequence(tokens)
        sequence.hash_blocks(8, len(tokens) // 8)
        return sequence.keys

    async def load(self, chain: list[BlockKey]) -> Loaded:
        return await self.store.loader.load(chain, self.store.tiers.match(chain))

    async def fill(self) -> None:
        """Use the whole pool for something else, so that what it holds is evicted."""
        await self.compute(prompt(NUM_BLOCKS * 8 - 2, seed=99))


@pytest.fixture
def run_node(serve_on: Callable[..., Any], checkpoint: Any) -> Callable[..., Any]:
    """run_node(device): the device of the pool."""

    @asynccontextmanager
    async def run(device: Any) -> AsyncIterator[Node]:
        config = Config(store=StoreOptions(host=HostTierOptions(capacity_nbytes=8 << 20)))
        async with (
            serve_on(device, checkpoint.path, num_blocks=NUM_BLOCKS) as driver,
            await TransferAgent.start(config.transfer, agent_id="node", epoch=1) as agent,
        ):
            engine = driver.engine
            blocks = engine.pool_tensor
            region = agent.register(blocks, name="pool")
            bytes_ = DeviceBytes(blocks, device) if device.runs_ahead else HostBytes(blocks.numpy())
            memory = BlockMemory(engine.pool, region, engine.layout, bytes_)
            store = await NodeStore.open(config, "", agent, engine, memory, lambda key, tier: None)
            try:
                yield Node(driver, memory, store)
            finally:
                await store.close(0)
                await memory.close()

    return run


@pytest.mark.parametrize("make_device", DEVICES)
async def test_what_was_evicted_comes_back(run_node, checkpoint, make_device) -> None:
    tokens = prompt(41)
    expected = checkpoint.greedy(tokens, 6)
    async with run_node(make_device()) as node:
        assert await node.compute(tokens, 6) == expected
        chain = node.chain(tokens)
        held = node.driver.engine.pool.match(chain)
        before = [node.memory.bytes.view(block).copy() for block in held]
        await node.fill()
        assert node.store.tiers.match(chain) == [Tier.HOST] * 5
        loaded = await node.load(chain)
        assert loaded.num_host == 5
        after = [node.memory.bytes.view(block) for block in loaded.block_ids]
        assert all(np.array_equal(a, b) for a, b in zip(after, before, strict=True))
        node.driver.engine.pool.release(loaded.block_ids)
        assert await node.compute(tokens, 6) == expected
        assert node.store.profile()["host_load_nbytes_per_s"] > 0


@pytest.mark.parametrize("make_device", DEVICES)
async def test_a_block_gone_bad_is_not_loaded(run_node, make_device) -> None:
    tokens = prompt(40)
    async with run_node(make_device()) as node:
        await node.compute(tokens)
        chain = node.chain(tokens)
        await node.fill()
        host = node.store.tiers.host
        host.bytes_of(host.slot_of(chain[2]))[5] ^= 1
        loaded = await node.load(chain)
        assert len(loaded.block_ids) == 2
        node.driver.engine.pool.release(loaded.block_ids)
        assert len(node.store.tiers.match(chain)) == 2


async def test_nothing_is_found_of_a_load_under_way(run_node) -> None:
    tokens, device = prompt(40), LateDevice()
    async with run_node(device) as node:
        await node.compute(tokens)
        chain, pool = node.chain(tokens), node.driver.engine.pool
        await node.fill()
        # Room without anything to copy out.
        while pool.num_cached:
            pool.evict(next(key for block, key in pool.sealed() if not pool._num_children[block]))
        device.copies.hold()
        given = device.copies.num_given
        loading = asyncio.create_task(node.load(chain))
        await device.copies.until_given(given + 1)
        assert pool.match(chain) == []
        assert not loading.done()
        device.copies.release()
        loaded = await loading
        assert pool.match(chain) == loaded.block_ids
        assert len(loaded.block_ids) == 5
        pool.release(loaded.block_ids)


@pytest.mark.parametrize("make_device", DEVICES)
async def test_a_follower_is_told_what_the_bytes_hash_to(run_node, make_device) -> None:
    """On a GPU they are hashed beside the loop, which goes on; the last block is not full."""
    device = make_device()
    async with run_node(device) as node:
        engine = node.driver.engine
        sequence = node.driver.sequence(prompt(21), max_tokens=4)
        await node.driver.run(sequence, prefill_only=True)
        pool = engine.pool
        grants = GrantTable(lambda slot: pool.generation_of(slot[1]), longest_s=60.0, clock=time.monotonic)
        handover = Handover(node.memory, node_pb2.KvAddress(node_id="me"), grants, ttl_s=60.0)
        handover.finish(sequence, node_pb2.TokenOut())
        if isinstance(device, LateDevice):
            device.copies.hold()
            given = device.copies.num_given
        telling = asyncio.create_task(anext(handover.chunks("you")))
        if isinstance(device, LateDevice):
            await device.copies.until_given(given + 1)
            assert not telling.done()
            device.copies.release()
        chunk = await telling
        table = sequence.block_table
        nbytes = engine.layout.block_nbytes
        assert [offset // nbytes for offset in chunk.blocks.offset] == table
        assert list(chunk.blocks.checksum) == [checksum(node.memory.bytes.view(b).data) for b in table]
        engine.release(sequence)
        # Its blocks stay until the follower gives them up.
        assert pool.num_used == len(table)
        grants.check_integrity()
        grants.release(chunk.lease_id)
        assert pool.num_used == 0


async def test_a_handover_announces_no_block_that_is_computed_again() -> None:
    """A prompt is preempted before its follower comes, and what was cached of it is evicted meanwhile."""
    pool = BlockPool(12, 4)
    scheduler = Scheduler(pool, max_batch_size=4, max_batch_tokens=5, max_len=48)
    layout, region = SimpleNamespace(block_size=4, block_nbytes=64), SimpleNamespace(id=1)
    memory = BlockMemory(pool, region, layout, HostBytes(np.zeros((12, 64), np.uint8)))  # type: ignore[arg-type]
    grants = GrantTable(lambda slot: pool.generation_of(slot[1]), longest_s=60.0, clock=time.monotonic)
    handover = Handover(memory, node_pb2.KvAddress(), grants, ttl_s=60.0)
    decoding, preempted = (
        Sequence(
            name, 0, prompt(n, n), n, sampling=Sampling(max_tokens=36), root_key=b"r" * 16, arrived_s=float(n)
        )
        for name, n in (("decodes", 12), ("prefills", 32))
    )
    preempted.prefill_only = True

    def end(plan: StepPlan | None) -> list[StepEvent]:
        """The plan's step has ended. As a prefill node, tell what it has computed of the prompt."""
        assert plan is not None
        num_sampled = len(plan.decodes) + sum(chunk.last for chunk in plan.chunks)
        events = scheduler.postprocess(plan, StepOutput([7] * num_sampled, [], {}), 0.0)
        for event in events:
            if event.sequence is preempted and not event.preempted:
                handover.progress(preempted, event.num_computed_tokens)
        return events

    scheduler.add(decoding)
    scheduler.add(preempted)
    while not preempted.num_preemptions:
        end(scheduler.schedule())
    while decoding.state is not State.FINISHED:
        end(scheduler.schedule())
    plan = scheduler.schedule()
    assert len(preempted.block_table) == 8 and preempted.num_computed_tokens == 0
    telling = asyncio.create_task(anext(handover.chunks("you")))
    for _ in range(10):
        await asyncio.sleep(0)
    assert not telling.done(), "its step has not ended"
    end(plan)
    chunk = await telling
    assert chunk.num_tokens == preempted.num_computed_tokens == 5
    assert [offset // 64 for offset in chunk.blocks.offset] == preempted.block_table[:1]
    grants.release(chunk.lease_id)
    while preempted.state is not State.KEPT_FOR_TRANSFER:
        end(scheduler.schedule())
    scheduler.release(preempted)
    pool.check_integrity()
    assert pool.num_used == 0
