"""Contexts that no rank has room for: cp ranks split their blocks."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import pytest
from prometheus_client.core import REGISTRY

from moonpool.engine.errors import RankLost
from moonpool.engine.node.metrics import observe_engine
from tests.engine.conftest import prompt
from tests.engine.ranks.conftest import ranks, serving
from tests.engine.ranks.test_exact import SHAPE
from tests.engine.ranks.test_handover import NUM_TOKENS, continues_exactly, side

RANK_BLOCKS = 7
RANK_TOKENS = 8 * RANK_BLOCKS
"""What one rank has room for."""


def longest(cp: int) -> list[int]:
    """Fills the pools of all ranks, but for the tokens that are decoded."""
    return prompt(cp * RANK_TOKENS - NUM_TOKENS, seed=cp)


@pytest.mark.parametrize(
    "words",
    [
        {"cp": 2},
        {"cp": 4},
        *(
            pytest.param(words, marks=pytest.mark.slow)
            for words in (
                {"cp": 3, "cp_min_tokens": 1},
                {"cp": 2, "tp": 2},
                {"cp": 2, "pp": 2},
                {"cp": 2, "separate_pools": True},
                {"cp": 4, "link": "gloo"},
            )
        ),
    ],
    ids=str,
)
async def test_a_prompt_of_all_pools_is_exact_and_found_again(make_checkpoint, words: dict[str, Any]) -> None:
    """In chunks, and decoded over all of it."""
    reference = make_checkpoint("qwen3", **SHAPE)
    tokens, cp = longest(words["cp"]), words["cp"]
    expected = reference.greedy(tokens, NUM_TOKENS)
    words = {"num_blocks": cp * RANK_BLOCKS, "max_batch_tokens": 32, **words}
    async with serving(reference.path, **words) as driver:
        engine = driver.engine
        assert len(engine.pool_tensor) == RANK_BLOCKS
        assert len(tokens) > (cp - 1) * RANK_TOKENS
        for num_cached in (0, (len(tokens) - 1) // 8 * 8):
            sequence = driver.sequence(tokens, max_tokens=NUM_TOKENS)
            (result,) = await driver.run(sequence)
            assert result.token_ids == expected
            assert sequence.num_cached_tokens == num_cached
        # Another prompt goes on from blocks of all ranks.
        other = tokens[: len(tokens) // 2 // 8 * 8] + prompt(9)
        sequence = driver.sequence(other, max_tokens=NUM_TOKENS)
        (result,) = await driver.run(sequence)
        assert sequence.num_cached_tokens == len(other) - 9
        assert result.token_ids == reference.greedy(other, NUM_TOKENS)


@pytest.mark.parametrize("family", ["qwen3", "gpt_oss", "deepseek_v3", "gemma2"])
async def test_a_batch_of_long_contexts_is_exact_for_windows_sinks_and_latents(
    make_checkpoint, family
) -> None:
    """Decodes of several sequences beside the chunks of others, preempted and computed again."""
    shape = {
        "gpt_oss": {"sliding_window": 12, "num_local_experts": 4},
        "deepseek_v3": {"num_key_value_heads": 8},
        "gemma2": {"sliding_window": 12, "attn_logit_softcapping": 3.0},
    }
    reference = make_checkpoint(family, **SHAPE | shape.get(family, {}))
    prompts = [prompt(n, seed=n) for n in (90, 70, 9, 33)]
    async with serving(reference.path, cp=2, num_blocks=28, max_batch_tokens=32, cp_min_tokens=3) as driver:
        sequences = [driver.sequence(tokens, max_tokens=NUM_TOKENS) for tokens in prompts]
        results = await driver.run(*sequences)
    for tokens, result in zip(prompts, results, strict=True):
        assert result.token_ids == reference.greedy(tokens, NUM_TOKENS)


@pytest.mark.parametrize(
    "target",
    [
        {"tp": 2, "pp": 1},
        {"tp": 1, "pp": 1},
        pytest.param({"tp": 1, "pp": 1, "cp": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
async def test_a_context_of_four_pools_is_handed_over(make_checkpoint, target: dict[str, int]) -> None:
    reference = make_checkpoint("qwen3", **SHAPE)
    nbytes = RANK_BLOCKS * 3 * 2 * 2 * 8 * 16 * 4  # layers, K and V, KV heads, tokens, dims, float32
    async with (
        side(reference.path, "context", 1, 1, 4, pool_nbytes=4 * nbytes) as context,
        side(reference.path, "decode", **target, pool_nbytes=16 * nbytes) as decode,
    ):
        assert context.memory.engine.pool.num_blocks == 4 * RANK_BLOCKS
        await continues_exactly(reference, context, decode, 4, n=4 * RANK_TOKENS - 1)


async def test_a_rank_lost_within_a_long_context_ends_the_group(make_checkpoint) -> None:
    reference = make_checkpoint("qwen3", **SHAPE)
    tokens = longest(2)
    words: dict[str, Any] = {"cp": 2, "num_blocks": 2 * RANK_BLOCKS, "max_batch_tokens": 16}
    async with ranks(2) as group, serving(reference.path, group, **words) as driver:
        driver.engine.add(driver.sequence(tokens, max_tokens=NUM_TOKENS))
        await driver.until(lambda: any(result.events for result in driver.results.values()))
        os.kill(group.ranks[0].pid, signal.SIGKILL)
        with pytest.raises(RankLost, match="rank 1"):
            await asyncio.wait_for(driver.engine.wait(), 60)
    async with serving(reference.path, **words) as driver:
        (result,) = await driver.run(driver.sequence(tokens, max_tokens=NUM_TOKENS))
        assert result.token_ids == reference.greedy(tokens, NUM_TOKENS)


async def test_memory_of_each_rank_is_shown(make_checkpoint) -> None:
    path = make_checkpoint("qwen3", **SHAPE).path
    async with serving(path, cp=2, num_blocks=2 * RANK_BLOCKS) as driver:
        engine = driver.engine
        collector = observe_engine(engine)
        try:
            blocks = engine.pool.allocate(5)
            nbytes = engine.layout.block_nbytes

            def shown(rank: int, state: str) -> float | None:
                labels = {"rank": str(rank), "state": state}
                return REGISTRY.get_sample_value("moonpool_rank_kv_bytes", labels)

            assert [shown(rank, "total") for rank in (0, 1)] == [RANK_BLOCKS * nbytes] * 2
            used = [sum(block % 2 == rank for block in blocks) * nbytes for rank in (0, 1)]
            assert [shown(rank, "used") for rank in (0, 1)] == used
            engine.pool.release(blocks)
        finally:
            REGISTRY.unregister(collector)
