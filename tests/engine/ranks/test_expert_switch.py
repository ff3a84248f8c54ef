"""Experts move to other ranks while requests are computed: no token changes."""

from __future__ import annotations

import asyncio
import os
import signal
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from moonpool.engine.checkpoint.config import ModelConfig
from moonpool.engine.errors import ExpertsRefused
from moonpool.engine.ranks.expert_switch import ExpertSwitches
from moonpool.engine.ranks.leader import ParallelRunner
from moonpool.engine.sharding.expert_placement import ExpertPlacement, plan_experts
from moonpool.engine.sharding.parallel_plan import ParallelPlan
from moonpool.runtime.errors import ConfigError
from tests.engine.conftest import Driver, prompt
from tests.engine.ranks.conftest import serving
from tests.engine.ranks.test_exact import MIXTURES, SHAPE
from tests.processes import stop

pytestmark = pytest.mark.asyncio
_TOKENS = 120


def placements(driver: Driver) -> list[ExpertPlacement]:
    """One with copies of hot experts, and the even one."""
    config, plan = driver.engine.config, driver.engine.plan
    assert config.moe is not None
    shape = (config.num_layers, config.moe.num_experts)
    load = np.random.default_rng(2).zipf(1.3, shape).clip(max=10_000)
    return [plan_experts(load, plan.ep, 2), ExpertPlacement.even(*shape, plan.ep)]


def runner_of(driver: Driver) -> ParallelRunner:
    loop = driver.engine._loop
    assert loop is not None and isinstance(loop.runner, ParallelRunner)
    return loop.runner


async def answers(driver: Driver) -> list[list[int]]:
    sequences = [driver.sequence(prompt(10 + 20 * i, seed=i), max_tokens=_TOKENS) for i in range(3)]
    return [result.token_ids for result in await driver.run(*sequences)]


@pytest.mark.parametrize(
    "plan",
    [
        {"tp": 2, "ep": 2, "all_to_all_tokens": 6},
        pytest.param({"tp": 4, "ep": 2}, marks=pytest.mark.slow),
        pytest.param({"tp": 2, "pp": 2, "ep": 2, "all_to_all_tokens": 4}, marks=pytest.mark.slow),
    ],
    ids=str,
)
async def test_experts_move_while_requests_run(make_checkpoint: Any, plan: dict[str, Any]) -> None:
    family, words = MIXTURES["qwen3-moe"]
    path = make_checkpoint(family, **SHAPE | words).path
    async with serving(path, max_batch_tokens=64, **plan) as driver:
        engine, runner = driver.engine, runner_of(driver)
        expected = await answers(driver)
        moved = used = 0
        # On a busy machine requests may end before an expert has moved: then others.
        while used < 2:
            running = asyncio.create_task(answers(driver))
            while not running.done():
                for placement in placements(driver):
                    moved += await engine.place_experts(placement)
                    assert engine.expert_placement == placement
            assert await running == expected
            used = runner.experts.used
        assert await answers(driver) == expected
        assert runner.experts.used == runner.expert_switch == moved, "steps compute with the latest"
        assert not runner.experts._prepared, "what was prepared is used, and what was before is dropped"
        assert await engine.place_experts(engine.expert_placement) == 0
        assert engine.num_moved_layers == moved


async def test_what_a_rank_cannot_read_is_refused_and_nothing_changes(make_checkpoint: Any) -> None:
    family, words = MIXTURES["qwen3-moe"]
    path = make_checkpoint(family, **SHAPE | words).path
    async with serving(path, max_batch_tokens=64, tp=2, ep=2) as driver:
        engine, before = driver.engine, driver.engine.expert_placement
        expected, (placement, _) = await answers(driver), placements(driver)
        with pytest.raises(ConfigError, match="on 3 ranks, this node has"):
            await engine.place_experts(ExpertPlacement.even(len(before.layers), len(before.layers[0]), 3))
        weights = path / "model.safetensors"
        weights.rename(hidden := path / "hidden")
        try:
            with pytest.raises(ExpertsRefused, match="experts of layer 0 were not moved"):
                await engine.place_experts(placement)
        finally:
            hidden.rename(weights)
        assert engine.expert_placement == before
        assert await answers(driver) == expected
        assert await engine.place_experts(placement) > 0
        assert await answers(driver) == expected


async def test_a_placement_after_a_cancelled_one_is_that_of_all_ranks(make_checkpoint: Any) -> None:
    """The operator's call ends while a rank still reads for it."""
    family, words = MIXTURES["qwen3-moe"]
    path = make_checkpoint(family, **SHAPE | words).path
    async with serving(path, max_batch_tokens=64, tp=2, ep=2) as driver:
        engine, (first, _) = driver.engine, placements(driver)
        # One whose first layer to move is another.
        second = ExpertPlacement(2, (engine.expert_placement.layers[0], *first.layers[1:]))
        expected, (rank,) = await answers(driver), engine.ranks.ranks
        stop(rank.pid)
        try:
            cancelled = asyncio.create_task(engine.place_experts(first))
            while ("experts", 0) not in rank._waiting:  # noqa: ASYNC110
                await asyncio.sleep(0)
            cancelled.cancel()
            placing = asyncio.create_task(engine.place_experts(second))
            for _ in range(10):
                await asyncio.sleep(0)
        finally:
            os.kill(rank.pid, signal.SIGCONT)
        assert await asyncio.wait_for(placing, 60) > 0
        assert cancelled.cancelled()
        assert engine.expert_placement == second
        assert await asyncio.wait_for(answers(driver), 60) == expected
        assert not rank._reading.done(), "a report that answers nothing"


@pytest.mark.parametrize("rank", range(4))
async def test_what_was_prepared_for_a_refused_switch_is_not_used(make_checkpoint: Any, rank: int) -> None:
    """Another rank may have refused it. The next one has its number, and maybe another stage's layer."""
    family, words = MIXTURES["qwen3-moe"]
    config = ModelConfig.from_checkpoint(make_checkpoint(family, **SHAPE | words).path)
    shard = ParallelPlan(tp=2, pp=2, ep=2).shard(config, rank)
    layers = [SimpleNamespace(mlp="before") for _ in shard.layers]
    model: Any = SimpleNamespace(shard=shard, layers=layers, read_mixture=lambda layer, _: f"of {layer}")
    switches, last = ExpertSwitches(model), config.num_layers - 1
    switches.prepare(1, 0, shard.expert_placement.layers[0])
    switches.prepare(1, last, shard.expert_placement.layers[last])
    switches.use(1)
    used = {layer: layers[i].mlp for i, layer in enumerate(shard.layers) if layers[i].mlp != "before"}
    assert used == ({last: f"of {last}"} if last in shard.layers else {})


async def test_experts_on_one_rank_do_not_move(make_checkpoint: Any) -> None:
    family, words = MIXTURES["qwen3-moe"]
    async with serving(make_checkpoint(family, **SHAPE | words).path) as driver:
        with pytest.raises(ConfigError, match=r"engine\.parallel\.ep is 1"):
            await driver.engine.place_experts(driver.engine.expert_placement)
