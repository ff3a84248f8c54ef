"""A plan of experts holds every one of them and evens out what was measured."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from moonpool.engine.checkpoint.config import ModelConfig
from moonpool.engine.sharding.expert_placement import ExpertPlacement, plan_experts
from moonpool.engine.sharding.parallel_plan import ParallelPlan
from moonpool.runtime.config.options import ParallelOptions
from moonpool.runtime.errors import ConfigError


@st.composite
def loads(draw: st.DrawFn) -> np.ndarray:
    """Rows [num_layers, num_experts]: any, with layers that were given none."""
    num_layers, num_experts = draw(st.integers(1, 3)), draw(st.integers(1, 12))
    rows = st.lists(st.integers(0, 10) | st.integers(0, 100_000), min_size=num_experts, max_size=num_experts)
    return np.array([draw(rows) for _ in range(num_layers)], np.int64)


@pytest.mark.slow
@given(load=loads(), num_ranks=st.integers(1, 6), num_replicas=st.integers(0, 8))
def test_every_expert_is_placed_and_no_rank_is_worse_than_with_the_even_placement(
    load: np.ndarray, num_ranks: int, num_replicas: int
) -> None:
    assume(num_ranks <= load.shape[1])
    plan = plan_experts(load, num_ranks, num_replicas)
    assert plan == plan_experts(load.copy(), num_ranks, num_replicas), "equal loads, equal plans"
    num_layers, num_experts = load.shape
    plan.check(num_layers, num_experts, num_ranks)
    deal = ExpertPlacement.even(num_layers, num_experts, num_ranks)
    for layer, holders in enumerate(plan.layers):
        held = [plan.experts_of(layer, rank) for rank in range(num_ranks)]
        assert set().union(*held) == set(range(num_experts)), "an expert is nowhere"
        num_copies = sum(map(len, holders))
        assert sum(map(len, held)) == num_copies <= num_experts + num_replicas
        assert max(map(len, held)) <= -(-num_copies // num_ranks) + num_replicas
    rows, plain = plan.rank_load(load), deal.rank_load(load)
    np.testing.assert_allclose(rows.sum(1), load.sum(1))
    assert (rows.max(1) <= plain.max(1) + 1e-6).all()
    assert 1 - 1e-9 <= plan.skew(load) <= deal.skew(load) + 1e-9


def test_a_hot_expert_is_replicated_until_the_ranks_are_even() -> None:
    load = np.array([[800, 100, 50, 50, 50, 50, 50, 50]])
    assert ExpertPlacement.even(1, 8, 4).skew(load) == pytest.approx(3.0)
    # Each rank has room for two, so the hot one has company.
    assert plan_experts(load, 4, 0).skew(load) == pytest.approx(850 / 300)
    plan = plan_experts(load, 4, 4)
    assert plan.layers[0][0] == (0, 1, 2, 3)
    assert plan.skew(load) < 1.2


@given(load=loads(), num_ranks=st.integers(1, 4))
def test_a_plan_comes_back_from_json_as_it_was(load: np.ndarray, num_ranks: int) -> None:
    plan = plan_experts(load, num_ranks, 2)
    assert ExpertPlacement.unpack(json.loads(plan.to_json())) == plan


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (None, r"plan\.json is not a placement of experts \(.*No such file"),
        ("[1]", "is not a placement"),
        ('{"num_ranks": 2, "layers": [[[0], []]]}', r"expert 1 is on ranks \[\] of 2"),
        ('{"num_ranks": 2, "layers": [[[0], [2]]]}', r"expert 1 is on ranks \[2\] of 2"),
        (
            '{"num_ranks": 2, "layers": [[[0], [1]]]}',
            r"is for 1 layers of 2 experts on 2 ranks, this node has 3 layers of 5 on 2",
        ),
        (
            '{"num_ranks": 2, "layers": [[[0], [1], [1], [1], [1]], [[0], [0], [0], [0], [0]], '
            "[[0], [1], [1], [1], [1]]]}",
            "rank 1 has no expert of layer 1",
        ),
    ],
    ids=["absent", "strange", "nowhere", "elsewhere", "of another model", "an idle rank"],
)
def test_a_plan_that_does_not_fit_is_refused_and_said_how_to_make_one(
    make_checkpoint, tmp_path: Path, text, sentence
) -> None:
    config = ModelConfig.from_checkpoint(make_checkpoint("mixtral", num_attention_heads=8).path)
    path = tmp_path / "plan.json"
    if text is not None:
        path.write_text(text)
    options = ParallelOptions(tp=2, ep=2, expert_plan_path=str(path))
    with pytest.raises(ConfigError, match=sentence) as caught:
        ParallelPlan.from_options(options, config, torch.device("cpu"))
    assert "moonpool experts" in str(caught.value)
