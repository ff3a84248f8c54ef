"""Ranks with a GPU each: they exchange over NCCL, and share no memory with their leader."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
from contextlib import AsyncExitStack
from dataclasses import replace

import numpy as np
import pytest

from moonpool.engine.errors import RankLost
from moonpool.engine.memory.remote_rank_bytes import RemoteRankBytes
from moonpool.engine.prefix_cache.store import NodeStore
from moonpool.kvstore.blocks.tier import Tier
from moonpool.runtime.config.options import Config, HostTierOptions, StoreOptions
from moonpool.transfer import checksum
from tests.engine.ranks.test_exact import SHAPE
from tests.engine.ranks.test_handover import NUM_TOKENS, continues_exactly, prompt, side

PLANS = [pytest.param(2, 1, id="tp2"), pytest.param(1, 2, id="pp2")]
WORDS = {"device": "cuda", "max_batch_size": 8}


@pytest.mark.gpu(2)
@pytest.mark.parametrize(("tp", "pp"), PLANS)
async def test_greedy_tokens_equal_transformers(make_checkpoint, tp, pp) -> None:
    """A node that has measured what its steps cost, and recorded none of them."""
    reference = make_checkpoint("qwen3", **SHAPE)
    async with side(reference.path, "node", tp, pp, **WORDS) as one:
        assert any(one.memory.engine.profile().values())
        prompts = [prompt(seed, n) for seed, n in enumerate((3, 17, 43))]
        batch = [one.driver.sequence(tokens, max_tokens=NUM_TOKENS) for tokens in prompts]
        results = await one.driver.run(*batch)
        assert [result.token_ids for result in results] == [
            reference.greedy(tokens, NUM_TOKENS) for tokens in prompts
        ]


@pytest.mark.gpu(2)
async def test_prompts_go_on_exactly_between_one_gpu_two_gpus_and_cpus(make_checkpoint) -> None:
    reference = make_checkpoint("llama", **SHAPE)
    async with AsyncExitStack() as stack:
        kinds = [("tensor", 2, 1, WORDS), ("pipeline", 1, 2, WORDS), ("one", 1, 1, WORDS), ("cpus", 2, 1, {})]
        sides = [
            await stack.enter_async_context(side(reference.path, name, tp, pp, **words))
            for name, tp, pp, words in kinds
        ]
        for seed, (source, target) in enumerate(itertools.permutations(sides, 2)):
            await continues_exactly(reference, source, target, seed)


@pytest.mark.gpu(2)
@pytest.mark.parametrize(("tp", "pp"), PLANS)
async def test_blocks_come_and_go_whole_and_by_way_of_host_memory(make_checkpoint, tp, pp) -> None:
    path = make_checkpoint("llama", **SHAPE).path
    config = replace(Config(), store=StoreOptions(host=HostTierOptions(capacity_nbytes=4 << 20)))
    pool_nbytes = 12 * 3 * 2 * 2 * 8 * 16 * 4
    async with side(path, "node", tp, pp, config=config, pool_nbytes=pool_nbytes, **WORDS) as one:
        memory, engine = one.memory.blocks, one.memory.engine
        assert isinstance(memory.bytes, RemoteRankBytes)
        nbytes = engine.layout.block_nbytes
        blocks = list(np.random.default_rng(0).integers(0, 256, (5, nbytes), np.uint8))
        sums, ids = [checksum(block.data) for block in blocks], [3, 1, 7, 2, 9]
        assert await asyncio.to_thread(memory.bytes.copy_in, blocks, ids, sums) is None
        copies = [np.empty_like(block) for block in blocks]
        assert await asyncio.to_thread(memory.bytes.copy_out, ids, copies) == sums
        assert all(np.array_equal(a, b) for a, b in zip(copies, blocks, strict=True))

        store = await NodeStore.open(config, "node", one.agent, engine, memory, lambda *_: None)
        tokens = prompt(1, 41)
        (result,) = await one.driver.run(one.driver.sequence(tokens, max_tokens=NUM_TOKENS))
        await one.driver.run(one.driver.sequence(prompt(2, 90), max_tokens=1))
        await store.tiers.copied()
        sequence = one.driver.sequence(tokens)
        sequence.hash_blocks(8, 5)
        assert store.tiers.match(sequence.keys) == [Tier.HOST] * 5
        loaded = await store.loader.load(sequence.keys, store.tiers.match(sequence.keys))
        assert loaded.num_host == 5
        engine.pool.release(loaded.block_ids)
        (again,) = await one.driver.run(one.driver.sequence(tokens, max_tokens=NUM_TOKENS))
        assert again.token_ids == result.token_ids
        await engine.halt()
        await store.close(0)


@pytest.mark.gpu(2)
async def test_a_lost_rank_is_noticed_and_its_leader_goes_on(make_checkpoint) -> None:
    path = make_checkpoint("llama", **SHAPE).path
    async with side(path, "node", 2, 1, **WORDS) as one:
        (rank,) = one.memory.engine.ranks.ranks
        running = asyncio.create_task(one.driver.run(one.driver.sequence(prompt(1), max_tokens=200)))
        await one.driver.until(lambda: one.driver.num_steps > 3)
        os.kill(rank.pid, signal.SIGKILL)
        with pytest.raises(RankLost):
            await asyncio.wait_for(one.memory.engine.wait(), 30)
        running.cancel()
