"""A limit on the rows of each expert: what it admits, and that nothing changes where it does not bind."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import REGISTRY, generate_latest

from moonpool.engine.experts.capacity import MIN_ROWS, CapacityRouter, admitted
from moonpool.engine.experts.mixture import Router
from moonpool.engine.node.metrics import observe_engine
from tests.engine.conftest import Driver, prompt
from tests.engine.ranks.conftest import serving
from tests.engine.ranks.test_exact import MIXTURES, SHAPE


def one_by_one(ranked: list[list[int]], top_k: int, limit: int) -> list[list[bool]]:
    """``admitted``, as its text says it."""
    found, used = [[False] * len(row) for row in ranked], dict.fromkeys(range(9), 0)
    for column in range(len(ranked[0])):
        for token, row in enumerate(ranked):
            if sum(found[token]) < top_k and used[row[column]] < limit:
                found[token][column] = True
                used[row[column]] += 1
    return found


@given(st.data())
def test_choices_are_admitted_in_order(data: st.DataObject) -> None:
    experts, n = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 12))
    count = data.draw(st.integers(1, experts))
    top_k, limit = data.draw(st.integers(1, count)), data.draw(st.integers(1, 12))
    ranked = [data.draw(st.permutations(range(experts)))[:count] for _ in range(n)]
    found = admitted(torch.tensor(ranked, dtype=torch.int32), top_k, limit, experts)
    assert found.tolist() == one_by_one(ranked, top_k, limit)


def router(num_experts: int, top_k: int) -> Router:
    """Most tokens prefer the first experts."""
    gate = torch.randn(num_experts, 16, generator=torch.Generator().manual_seed(0))
    bias = torch.linspace(8, 0, num_experts)
    return Router(lambda x: x @ gate.T + bias, top_k, renormalize=True)  # type: ignore[arg-type]


@pytest.mark.parametrize("reroutes", [True, False])
@pytest.mark.parametrize("factor", [1.0, 1.5])
def test_no_expert_has_more_rows_than_its_limit(factor: float, reroutes: bool) -> None:
    x = torch.randn(200, 16, generator=torch.Generator().manual_seed(1))
    plain = router(8, 2)
    weights, ids = CapacityRouter(plain, 8, factor, reroutes=reroutes)(x)
    rows = torch.bincount(ids.flatten(), minlength=9)
    limit = int(factor * 200 * 2 / 8)
    before = plain(x)
    assert torch.bincount(before[1].flatten()).max() > limit >= rows[:8].max()
    assert (rows[8] <= 8) if reroutes else (rows[8] > 40)
    assert not weights[ids == 8].any()
    torch.testing.assert_close(weights.sum(1), (ids < 8).any(1).float())
    for of_token in ids.tolist():
        chosen = [expert for expert in of_token if expert < 8]
        assert len(set(chosen)) == len(chosen)
    assert torch.equal(ids[:10, 0], before[1][:10, 0]), "best choices of early tokens are admitted first"


def test_a_limit_that_does_not_bind_changes_no_bit() -> None:
    x, plain = torch.randn(50, 16), router(8, 2)
    for factor, rows in ((4.0, 50), (1.0, MIN_ROWS)):
        limited = CapacityRouter(plain, 8, factor, reroutes=False)
        for mine, theirs in zip(limited(x[:rows]), plain(x[:rows]), strict=True):
            assert torch.equal(mine, theirs)


PROMPT_TOKENS, NUM_PROMPTS, NUM_TOKENS = 200, 3, 5


async def answers(driver: Driver) -> list[list[int]]:
    """One prompt a step, so that its tokens do not depend on others."""
    found = []
    for seed in range(NUM_PROMPTS):
        words = {"max_tokens": NUM_TOKENS, "ignore_eos": True}
        (result,) = await driver.run(driver.sequence(prompt(PROMPT_TOKENS, seed), **words))
        found.append(result.token_ids)
    await driver.engine.refresh_expert_load()
    return found


def dropped_metric(driver: Driver) -> float:
    collector = observe_engine(driver.engine)
    try:
        lines = generate_latest(REGISTRY).decode().splitlines()
    finally:
        REGISTRY.unregister(collector)
    return float(next(line for line in lines if line.startswith("moonpool_expert_dropped_total")).split()[1])


@pytest.mark.parametrize(
    "plan",
    [
        {"tp": 2, "ep": 2},
        pytest.param({"tp": 2, "ep": 2, "all_to_all_tokens": 4}, marks=pytest.mark.slow),
        pytest.param({"tp": 4, "ep": 2, "all_to_all_tokens": 4}, marks=pytest.mark.slow),
        pytest.param({"tp": 2, "ep": 2, "pp": 2, "separate_pools": True}, marks=pytest.mark.slow),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["qwen3-moe", pytest.param("deepseek-v3", marks=pytest.mark.slow)])
async def test_rows_of_ranks_are_limited_and_drops_counted(
    make_checkpoint: Any, name: str, plan: dict[str, Any]
) -> None:
    family, words = MIXTURES[name]
    path = make_checkpoint(family, **SHAPE | words).path
    plan = {"max_batch_tokens": 256, **plan}
    async with serving(path, **plan) as driver:
        expected, all_rows = await answers(driver), int(driver.engine.expert_load().sum())
        num_experts = driver.engine.expert_load().shape[1]
        assert driver.engine.num_dropped_choices() == dropped_metric(driver) == 0
        names = {driver.engine.model_fingerprint}
    async with serving(path, **plan, expert_capacity=float(num_experts), expert_overflow="drop") as driver:
        assert await answers(driver) == expected, "no expert has more rows than there are tokens"
    dropped: dict[str, int] = {}
    for overflow in ("drop", "reroute"):
        async with serving(path, **plan, expert_capacity=1.0, expert_overflow=overflow) as driver:
            await answers(driver)
            load, dropped[overflow] = driver.engine.expert_load(), driver.engine.num_dropped_choices()
            assert load.sum() + dropped[overflow] == all_rows
            assert dropped_metric(driver) == dropped[overflow]
            names.add(driver.engine.model_fingerprint)
        if plan.keys() == {"max_batch_tokens", "tp", "ep"}:  # each prompt is one call
            moe = driver.engine.config.moe
            assert moe is not None
            limit = math.ceil(PROMPT_TOKENS * moe.top_k / num_experts)
            assert load.max() <= NUM_PROMPTS * (limit + NUM_TOKENS - 1)
    assert dropped["reroute"] < dropped["drop"] > 0
    assert len(names) == 3, "blocks computed with a limit are not taken for others"
