"""What each expert was given is counted on whichever ranks its layer is, and is what routers chose."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from prometheus_client import REGISTRY, generate_latest

from moonpool.engine.node.metrics import observe_engine
from moonpool.engine.sharding.expert_placement import skew
from tests.engine.conftest import Reference
from tests.engine.ranks.conftest import serving

NUM_LAYERS, NUM_EXPERTS, TOP_K = 3, 8, 3
DENSE = 1


def chosen(reference: Reference, token_ids: list[int]) -> np.ndarray:
    """int64 [num_layers, num_experts]: how many of the tokens transformers sends to each expert."""
    with torch.inference_mode():
        logits = reference.model(torch.tensor([token_ids]), output_router_logits=True).router_logits
    load = np.zeros((NUM_LAYERS, NUM_EXPERTS), np.int64)
    for layer, of_layer in zip((0, 2), logits, strict=True):
        load[layer] = np.bincount(of_layer.topk(TOP_K).indices.flatten(), minlength=NUM_EXPERTS)
    return load


PLANS = {
    "alone": {},
    # Long pieces are shared out, of short ones every share computes all tokens.
    "pp2-cp2": {"pp": 2, "cp": 2, "cp_min_tokens": 8},
    "tp2-pp2": {"tp": 2, "pp": 2},
    "pp2-apart": {"pp": 2, "separate_pools": True},
    "ep2-pp2-apart": {"tp": 2, "ep": 2, "pp": 2, "separate_pools": True},
    "ep2": {"tp": 2, "ep": 2},
    "ep2-cp2-all-to-all": {"tp": 2, "ep": 2, "cp": 2, "cp_min_tokens": 8, "all_to_all_tokens": 4},
}


@pytest.mark.parametrize(
    "plan",
    [
        pytest.param(
            plan, id=name, marks=[] if name in ("alone", "pp2-cp2", "pp2-apart") else pytest.mark.slow
        )
        for name, plan in PLANS.items()
    ],
)
async def test_the_rows_of_every_expert_are_counted_once(make_checkpoint, plan) -> None:
    reference = make_checkpoint(
        "qwen2_moe", num_attention_heads=8, num_key_value_heads=2, mlp_only_layers=[DENSE]
    )
    prompts = [list(range(start, start + n)) for start, n in ((3, 1), (20, 9), (60, 40))]
    async with serving(reference.path, max_batch_tokens=32, micro_batch_tokens=8, **plan) as driver:
        await driver.engine.refresh_expert_load()
        assert not driver.engine.expert_load().any(), "measuring what steps cost is not load"
        results = await driver.run(*(driver.sequence(prompt, max_tokens=8) for prompt in prompts))
        await driver.engine.refresh_expert_load()
        load = driver.engine.expert_load()
        collector = observe_engine(driver.engine)
        try:
            metrics = generate_latest(REGISTRY).decode()
        finally:
            REGISTRY.unregister(collector)
    # The last token's rows would be the next step's.
    texts = [p + r.token_ids[:-1] for p, r in zip(prompts, results, strict=True)]
    expected = sum(chosen(reference, text) for text in texts)
    np.testing.assert_array_equal(load, expected)
    of_layers = skew(load)
    assert len(of_layers) == 2
    assert f"moonpool_expert_rows_total {float(load.sum())}\n" in metrics
    assert f'moonpool_expert_skew_ratio{{layers="worst"}} {of_layers.max()}\n' in metrics
    if "ep" in plan:
        halves = load[[0, 2]].reshape(2, 2, -1).sum(2)
        rank_skew = (halves.max(1) / halves.mean(1)).mean()
        assert f"moonpool_expert_rank_skew_ratio {rank_skew}\n" in metrics
        assert ("moonpool_all_to_all_seconds_total 0.0\n" in metrics) == ("all_to_all_tokens" not in plan)


def test_skew_is_of_the_layers_that_were_given_rows() -> None:
    load = np.array([[4, 4, 4, 4], [0, 0, 0, 0], [0, 12, 2, 2]])
    np.testing.assert_allclose(skew(load), [1.0, 3.0])
    assert len(skew(np.zeros((2, 4), np.int64))) == 0
    assert len(skew(np.zeros((2, 0), np.int64))) == 0
