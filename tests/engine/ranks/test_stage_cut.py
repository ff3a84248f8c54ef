"""Stages are balanced: by the weights of a step, and, as the doctor says, by measured seconds."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, combinations, pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.doctor.evidence import Evidence
from moonpool.doctor.nodes import check_ranks
from moonpool.engine.checkpoint.config import ModelConfig
from moonpool.engine.ranks.leader import StepTimes
from moonpool.engine.sharding.parallel_plan import ParallelPlan
from moonpool.engine.sharding.stage_cut import StageMemory, better_cut, cut, slowest_s
from moonpool.engine.sharding.stage_work import ModelWork, StepShape, balanced_layers
from moonpool.runtime.errors import ConfigError
from tests.engine.ranks.conftest import serving
from tests.engine.ranks.test_exact import SHAPE

SECONDS = st.floats(0.01, 1.0)


@given(
    layers=st.lists(st.tuples(SECONDS, st.integers(1, 9)), min_size=1, max_size=8),
    head_s=st.floats(0, 3),
    ends=st.tuples(st.integers(0, 9), st.integers(0, 9)),
    limit=st.one_of(st.none(), st.integers(1, 60)),
    data=st.data(),
)
def test_no_other_cut_that_fits_has_a_faster_slowest_stage(layers, head_s, ends, limit, data) -> None:
    """Against all others: contiguous, whole, at least a layer each, none beyond the limit of memory."""
    n, layers_s, (embedding, head) = len(layers), [seconds for seconds, _ in layers], ends
    nbytes = [size for _, size in layers]
    num_stages = data.draw(st.integers(1, n))
    memory = None if limit is None else StageMemory(nbytes, embedding, head, limit)
    found = cut(layers_s, head_s, num_stages, memory)

    def fits(borders: Sequence[int]) -> bool:
        sizes = [sum(nbytes[first:end]) for first, end in pairwise(borders)]
        sizes[0] += embedding
        sizes[-1] += head
        return limit is None or max(sizes) <= limit

    others = [(0, *inner, n) for inner in combinations(range(1, n), num_stages - 1)]
    fitting = [[b - a for a, b in pairwise(borders)] for borders in others if fits(borders)]
    if not fitting:
        assert found is None
        return
    assert found is not None
    assert sum(found) == n and min(found) >= 1 and fits([0, *accumulate(found)])
    best_s = min(slowest_s(layers_s, head_s, other) for other in fitting)
    assert slowest_s(layers_s, head_s, found) == pytest.approx(best_s, rel=1e-6)


def test_embedding_head_and_experts_weigh_what_a_step_reads_and_multiplies(make_checkpoint) -> None:
    def layers(pp: int, family: str = "llama", has_head: bool = True, rows: int = 8, **shape: object) -> str:
        config = ModelConfig.from_checkpoint(make_checkpoint(family, **SHAPE | shape).path)
        return "+".join(map(str, balanced_layers(config, pp, StepShape(rows, has_head, 4, "cpu"))))

    assert layers(2, num_hidden_layers=8) == "4+4"
    # A head of 2.4 layers in decoding; prompts have logits for one token.
    large = {"num_hidden_layers": 8, "vocab_size": 1100}
    assert layers(2, **large) == "5+3"
    assert layers(2, has_head=False, **large) == "4+4"
    # Eight rows read nearly all eight experts, one row three; the first layers are dense and small.
    mixed = {"num_hidden_layers": 8, "moe_intermediate_size": 160, "mlp_only_layers": [0, 1, 2, 3]}
    assert layers(2, "qwen3_moe", **mixed) == "6+2"
    assert layers(2, "qwen3_moe", rows=1, **mixed) == "5+3"


def test_weights_that_fit_no_cut_are_refused(make_checkpoint) -> None:
    config = ModelConfig.from_checkpoint(make_checkpoint("llama", **SHAPE | {"num_hidden_layers": 4}).path)
    step = StepShape(8, True, 4, "cuda")
    whole = ModelWork.of(config, step)
    one = whole.layers_nbytes[0]
    assert balanced_layers(config, 2, step, limit_nbytes=whole.embedding_nbytes + 2 * one) == (2, 2)
    assert balanced_layers(config, 2, step, tp=2, limit_nbytes=whole.embedding_nbytes / 2 + one) == (2, 2)
    with pytest.raises(ConfigError, match=r"GB of weights do not fit 2 stages of 1 ranks with room for"):
        balanced_layers(config, 2, step, limit_nbytes=1.9 * one)


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
    head = {"vocab_size": 16_000, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 8}
    path: Path = make_checkpoint("qwen2", **SHAPE | head).path

    async def served(layers: str) -> tuple[list[int], str, list[float]]:
        """Return its tokens, a better cut, and the seconds of each stage's steps."""
        async with serving(path, pp=2, pp_layers=layers) as driver:
            steps: list[StepTimes] = []
            driver.engine.observe_steps(steps.append)
            sequence = driver.sequence(range(1, 20), max_tokens=250, ignore_eos=True)
            (result,) = await driver.run(sequence)
            better = driver.engine.rank_times().better_layers()
            # The least: other processes only add to it.
            stages_s = [min(step.compute_s[stage] for step in steps) for stage in range(2)]
            print(f"{driver.engine.plan}: a step's least compute {stages_s} s, better {better!r}")
            return result.token_ids, better, stages_s

    tokens, better, even_s = await served("4+4")
    first, last = map(int, better.split("+"))
    assert first > last
    again, _, balanced_s = await served(better)
    assert again == tokens
    assert max(balanced_s) / sum(balanced_s) < max(even_s) / sum(even_s)
    by_law, _, law_s = await served("")
    assert by_law == tokens
    assert max(law_s) / sum(law_s) < max(even_s) / sum(even_s)
    # The head against the layers, as estimated and as measured with equal stages.
    work = ModelWork.of(ModelConfig.from_checkpoint(path), StepShape(1, True, 4, "cpu"))
    estimated = (sum(work.layers[4:]) + work.head) / sum(work.layers[:4])
    assert estimated / 3 < even_s[1] / even_s[0] < estimated * 3
    node = {"node_id": "decode-0", "ranks": "tp 1 × pp 2", "better_pp_layers": better}
    (finding,) = check_ranks(Evidence({"nodes": [node]}))
    assert f"engine.parallel.pp_layers={better}" in finding.advice


def test_shards_have_the_layers_of_the_option(make_checkpoint) -> None:
    config = ModelConfig.from_checkpoint(make_checkpoint("qwen2", **SHAPE).path)
    shards = ParallelPlan(pp=2, pp_layers=(1, config.num_layers - 1)).shards(config)
    assert [list(shard.layers) for shard in shards] == [[0], list(range(1, config.num_layers))]
