"""Models whose layers all have windows: a sequence holds the blocks of its window, not of all its tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from moonpool.engine.checkpoint.config import ModelConfig
from moonpool.engine.device.device import CpuDevice, Device
from tests.engine.conftest import prompt
from tests.engine.late_device import LateDevice
from tests.engine.ranks.test_exact import SHAPE
from tests.engine.ranks.test_handover import continues_exactly, side

WINDOW = 20


@pytest.fixture
def checkpoint(make_checkpoint: Callable[..., Any]) -> Any:
    return make_checkpoint("mistral", sliding_window=WINDOW)


@pytest.mark.parametrize(
    "device", [CpuDevice(), pytest.param(LateDevice(), marks=pytest.mark.slow)], ids=["cpu", "late"]
)
async def test_long_sequences_need_the_blocks_of_their_windows(checkpoint, serve_on, device: Device) -> None:
    """Four of 130 tokens, 17 blocks each, in 28: one after another they are prefilled; all decode at once."""
    prompts = [prompt(40, seed) for seed in range(4)]
    async with serve_on(device, checkpoint.path, num_blocks=28, max_batch_tokens=16) as driver:
        most = 0

        def note(events: list[Any], then: Any = driver.engine.on_step) -> None:
            nonlocal most
            tables = [sequence.block_table for sequence in driver.engine._scheduler.decoding]
            most = max([most, *(sum(block >= 0 for block in table) for table in tables)])
            then(events)

        driver.engine.on_step = note
        results = await driver.run(*(driver.sequence(p, max_tokens=90) for p in prompts))
        assert [r.token_ids for r in results] == checkpoint.greedy_each(prompts, 90)
        # Blocks of 8: a window of 20 is in at most 4 of them, a new one comes before the first is passed.
        assert most <= 5
        assert driver.engine.stats().num_preemptions == 0
        driver.engine.pool.check_integrity()


async def test_what_was_passed_is_found_again_while_there_is_room(checkpoint, serve_on) -> None:
    tokens = prompt(60)
    async with serve_on(CpuDevice(), checkpoint.path, num_blocks=64) as driver:
        (first,) = await driver.run(driver.sequence(tokens, max_tokens=50))
        again = driver.sequence(tokens + first.token_ids[:40], max_tokens=10)
        (second,) = await driver.run(again)
        assert again.num_cached_tokens == 96
        assert second.token_ids == first.token_ids[40:]


async def test_a_preempted_sequence_begins_with_all_its_tokens(checkpoint, serve_on) -> None:
    prompts = [prompt(30, seed) for seed in range(3)]
    async with serve_on(CpuDevice(), checkpoint.path, num_blocks=14, max_batch_tokens=8) as driver:
        results = await driver.run(*(driver.sequence(p, max_tokens=60) for p in prompts))
        assert [r.token_ids for r in results] == checkpoint.greedy_each(prompts, 60)


async def test_it_goes_on_past_its_window_after_a_hand_over(make_checkpoint) -> None:
    reference = make_checkpoint("mistral", **SHAPE | {"sliding_window": WINDOW})
    async with side(reference.path, "source", 1, 1) as source, side(reference.path, "target", 1, 1) as target:
        for seed in range(3):
            await continues_exactly(reference, source, target, seed)
        assert target.memory.engine.pool.num_used == 0


def test_a_layer_that_attends_to_all_keeps_all(make_checkpoint) -> None:
    gemma = make_checkpoint("gemma2", query_pre_attn_scalar=16, sliding_window=WINDOW).path
    assert ModelConfig.from_checkpoint(gemma).widest_window == 0
