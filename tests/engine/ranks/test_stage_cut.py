"""Stages are balanced by measured seconds: the best cut, and ranks that are told it."""

from __future__ import annotations

from itertools import combinations, pairwise
from pathlib import Path
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.doctor.evidence import Evidence
from moonpool.doctor.nodes import check_ranks
from moonpool.engine.checkpoint.config import ModelConfig
from moonpool.engine.ranks.leader import StepTimes
from moonpool.engine.sharding.parallel_plan import ParallelPlan
from moonpool.engine.sharding.stage_cut import better_cut, cut, slowest_s
from tests.engine.ranks.conftest import serving
from tests.engine.ranks.test_exact import SHAPE

SECONDS = st.floats(0.01, 1.0)


@given(layers_s=st.lists(SECONDS, min_size=1, max_size=8), head_s=st.floats(0, 3), data=st.data())
def test_no_other_cut_has_a_faster_slowest_stage(layers_s, head_s, data) -> None:
    n = len(layers_s)
    num_stages = data.draw(st.integers(1, n))
    found = cut(layers_s, head_s, num_stages)
    assert sum(found) == n
    assert min(found) >= 1
    others = ((0, *inner, n) for inner in combinations(range(1, n), num_stages - 1))
    best_s = min(slowest_s(layers_s, head_s, [b - a for a, b in pairwise(ends)]) for ends in others)
    assert slowest_s(layers_s, head_s, found) == pytest.approx(best_s, rel=1e-6)


def test_a_better_cut_is_told_after_enough_steps_if_it_is_worth_a_restart() -> None:
    head_of_nine_layers = [12.0, 12.0 + 9.1]
    assert better_cut(head_of_nine_layers, (12, 12), 199) is None
    assert better_cut(head_of_nine_layers, (12, 12), 200) == (17, 7)
    assert better_cut([17.0, 7.0 + 9.1], (17, 7), 200) is None
    assert better_cut([12.0, 12.8], (12, 12), 200) is None
    assert better_cut([24.0, 6.0], (12, 12), 200) == (8, 16)
    assert better_cut([24.0], (24,), 200) is None


@pytest.mark.slow
async def test_a_large_head_moves_layers_forward_and_tokens_stay_the_same(make_checkpoint) -> None:
    """The doctor says which layers, by what the stages took."""
    head = {"vocab_size": 64_000, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 8}
    path: Path = make_checkpoint("qwen2", **SHAPE | head).path

    async def served(layers: str) -> tuple[list[int], str, float]:
        """Return its tokens, a better cut, and the busiest stage's fraction of a step's compute."""
        async with serving(path, pp=2, pp_layers=layers) as driver:
            steps: list[StepTimes] = []
            driver.engine.observe_steps(steps.append)
            sequence = driver.sequence(range(1, 20), max_tokens=250, ignore_eos=True)
            (result,) = await driver.run(sequence)
            better = driver.engine.rank_times().better_layers()
            stages_ms = [1e3 * median(step.compute_s[stage] for step in steps) for stage in range(2)]
            print(f"{driver.engine.plan}: a step's compute {stages_ms} ms, better {better!r}")
            return result.token_ids, better, max(stages_ms) / sum(stages_ms)

    tokens, better, fraction = await served("")
    first, last = map(int, better.split("+"))
    assert first > last
    again, _, balanced = await served(better)
    assert again == tokens
    assert balanced < fraction
    node = {"node_id": "decode-0", "ranks": "tp 1 × pp 2", "better_pp_layers": better}
    (finding,) = check_ranks(Evidence({"nodes": [node]}))
    assert f"engine.parallel.pp_layers={better}" in finding.advice


def test_shards_have_the_layers_of_the_option(make_checkpoint) -> None:
    config = ModelConfig.from_checkpoint(make_checkpoint("qwen2", **SHAPE).path)
    shards = ParallelPlan(pp=2, pp_layers=(1, config.num_layers - 1)).shards(config)
    assert [list(shard.layers) for shard in shards] == [[0], list(range(1, config.num_layers))]
