"""However a model is spread over ranks, its greedy tokens are those of transformers."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moonpool.engine.checkpoint.config import ModelConfig
from moonpool.engine.sharding.expert_placement import plan_experts
from tests.engine.ranks.conftest import ranks, serving
from tests.lazily import Lazily

transformers = Lazily("transformers")

# Heads for four ranks, of which pairs share a KV head; and what differs between the families.
SHAPE: dict[str, Any] = {"num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 160}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "mixtral": ("mixtral", {}),
    "qwen2-moe": ("qwen2_moe", {"mlp_only_layers": [1]}),
    "qwen3-moe": ("qwen3_moe", {"norm_topk_prob": True}),
}
# Families whose layers differ from Llama's in more than these.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "olmo2": ("olmo2", {}),
    "gemma2": ("gemma2", {"sliding_window": 12, "attn_logit_softcapping": 3.0}),
    "gemma3": ("gemma3_text", {"sliding_window": 12, "sliding_window_pattern": 2, "layer_types": None}),
    "phi3": ("phi3", {}),
    "phi4": ("phi3", {"partial_rotary_factor": 0.75, "tie_word_embeddings": True}),
    "glm4": ("glm4", {}),
    "deepseek-v2": ("deepseek_v2", {"num_key_value_heads": 8}),
    "deepseek-v3": ("deepseek_v3", {"num_key_value_heads": 8}),
    "gpt-oss": ("gpt_oss", {"sliding_window": 12, "num_local_experts": 4}),
}
# With blocks of 8: shorter than, equal to and across block borders.
LENGTHS = (1, 8, 9, 23, 40)
NUM_TOKENS = 16
MIXTURES = {name: model for name, model in MODELS.items() if name in ("mixtral", "qwen2-moe", "qwen3-moe")}
MIXTURES |= {name: FAMILIES[name] for name in ("gpt-oss", "deepseek-v3")}
PLANS = [
    {"tp": 2, "pp": 2},
    *(
        pytest.param(plan, marks=pytest.mark.slow)
        for plan in (
            {"tp": 2},
            {"tp": 4},
            {"pp": 2},
            {"pp": 3},
            {"pp": 2, "pp_layers": "1+2"},
            {"cp": 2},
            {"cp": 3},
            {"cp": 2, "tp": 2},
            {"cp": 2, "pp": 2},
        )
    ),
]


def prompts() -> list[list[int]]:
    random = np.random.default_rng(0)
    return [random.integers(0, 160, n).tolist() for n in LENGTHS]


def named(plan: dict[str, Any]) -> str:
    return "-".join(f"{k}{v}" for k, v in plan.items())


@pytest.mark.parametrize("plan", PLANS, ids=named)
async def test_greedy_tokens_equal_transformers(plan, make_checkpoint) -> None:
    await are_exact(plan, make_checkpoint, MODELS)


@pytest.mark.parametrize(
    "plan",
    [
        {"tp": 2},
        *(
            pytest.param(plan, marks=pytest.mark.slow)
            for plan in ({"pp": 2}, {"cp": 2}, {"tp": 4}, {"cp": 2, "tp": 2})
        ),
    ],
    ids=named,
)
async def test_other_families_give_the_tokens_of_transformers(plan, make_checkpoint) -> None:
    await are_exact(plan, make_checkpoint, FAMILIES)


async def test_a_prompt_shared_out_gives_the_tokens_of_transformers(make_checkpoint) -> None:
    """With windows, which need all keys in their places, and without, where parts are merged."""
    windows = {"use_sliding_window": True, "sliding_window": 12, "max_window_layers": 1}
    await are_exact({"cp": 2}, make_checkpoint, {"qwen2": ("qwen2", windows), "qwen3": MODELS["qwen3"]})


EXPERT_PLANS = [
    # Prompts go to their experts, single tokens are seen by all ranks.
    {"tp": 2, "ep": 2, "all_to_all_tokens": 6},
    *(
        pytest.param(plan, marks=pytest.mark.slow)
        for plan in (
            # Some ranks have no token of their own, or no row for another.
            {"tp": 2, "ep": 2, "all_to_all_tokens": 1},
            {"tp": 2, "ep": 2, "all_to_all_tokens": 1, "link": "gloo"},
            {"tp": 4, "ep": 4, "all_to_all_tokens": 1},
            {"tp": 4, "ep": 4, "all_to_all_tokens": 10000},
            {"tp": 4, "ep": 2, "all_to_all_tokens": 6},
            {"tp": 2, "pp": 2, "ep": 2, "all_to_all_tokens": 4},
            {"tp": 2, "cp": 2, "ep": 2, "all_to_all_tokens": 1},
        )
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize("plan", EXPERT_PLANS, ids=named)
async def test_experts_on_ranks_of_their_own_are_exact(plan, make_checkpoint) -> None:
    await are_exact(plan, make_checkpoint, MIXTURES)


@pytest.mark.parametrize(
    ("plan", "names"),
    [
        pytest.param({"tp": 2, "ep": 2, "all_to_all_tokens": 6}, ["qwen3-moe"], marks=pytest.mark.slow),
        pytest.param({"tp": 4, "ep": 4, "all_to_all_tokens": 1}, list(MIXTURES), marks=pytest.mark.slow),
    ],
    ids=["ep2", "ep4"],
)
async def test_wherever_a_plan_puts_experts_and_their_copies_they_are_exact(
    plan, names, make_checkpoint, tmp_path
) -> None:
    """Hot experts are on several ranks, layer by layer others."""
    for name in names:
        family, words = MIXTURES[name]
        config = ModelConfig.from_checkpoint(make_checkpoint(family, **SHAPE | words).path)
        load = (
            np.random.default_rng(1).zipf(1.3, (config.num_layers, config.moe.num_experts)).clip(max=10_000)
        )
        experts = plan_experts(load, plan["ep"], 3)
        assert max(len(ranks) for layer in experts.layers for ranks in layer) > 1
        path = tmp_path / f"{name}.json"
        path.write_text(experts.to_json())
        await are_exact({**plan, "expert_plan_path": str(path)}, make_checkpoint, {name: MIXTURES[name]})


async def are_exact(plan, make_checkpoint, models) -> None:
    async with ranks(prod(plan.get(name, 1) for name in ("tp", "pp", "cp"))) as group:
        for family, shape in models.values():
            reference = make_checkpoint(family, **SHAPE | shape)
            expected = reference.greedy_each(prompts(), NUM_TOKENS)
            # A batch of mixed lengths, prompts in chunks of at most 32 tokens, of which a pipeline makes
            # pieces of 16, which are shared out however short; then each again, its prefix from the cache.
            words = {"max_batch_tokens": 32, "micro_batch_tokens": 16, "cp_min_tokens": 1}
            async with serving(reference.path, group, **words, **plan) as driver:
                for _ in range(2):
                    sequences = [driver.sequence(prompt, max_tokens=NUM_TOKENS) for prompt in prompts()]
                    results = await driver.run(*sequences)
                    assert [result.token_ids for result in results] == expected
                assert sequences[-1].num_cached_tokens == 32


@pytest.mark.parametrize(
    ("plan", "link"),
    [
        ({"tp": 2, "pp": 2}, "shm"),
        pytest.param({"tp": 2, "pp": 2}, "gloo", marks=pytest.mark.slow),
        ({"cp": 2}, "shm"),
        pytest.param({"cp": 3, "tp": 2}, "gloo", marks=pytest.mark.slow),
    ],
)
async def test_sampling_and_logprobs_equal_the_single_process_engine(make_checkpoint, plan, link) -> None:
    """Seeded tokens, their logprobs and those of the prompt, over words that two ranks share unevenly."""
    reference = make_checkpoint("qwen3", **SHAPE | {"vocab_size": 161})
    prompt = prompts()[-1]
    words = {"max_tokens": 12, "temperature": 0.8, "seed": 7, "top_p": 0.9, "num_logprobs": 3}
    results = []
    for some in ({}, {**plan, "micro_batch_tokens": 16, "cp_min_tokens": 1, "link": link}):
        async with serving(reference.path, max_batch_tokens=32, **some) as driver:
            sequences = [
                driver.sequence(prompt, prompt_logprobs=True, **words),
                driver.sequence(prompt[:5], max_tokens=12),
            ]
            results.append(await driver.run(*sequences))
    for alone, together in zip(*results, strict=True):
        assert alone.token_ids == together.token_ids
    (mine,), (theirs,) = (
        [event.prompt_logprobs for event in result[0].events if event.prompt_logprobs] for result in results
    )
    assert len(theirs) == len(prompt) - 1
    np.testing.assert_allclose([r.logprob for r in mine], [r.logprob for r in theirs], atol=1e-4)
    mine, theirs = ([e.logprobs.logprob for e in result[0].events if e.logprobs] for result in results)
    np.testing.assert_allclose(mine, theirs, atol=1e-4)


DEMO = Path(__file__).parents[3] / "moonpool" / "demo" / "model"


@pytest.mark.slow
async def test_the_demo_model_is_exact(make_checkpoint) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(DEMO, dtype="float32")
    random = np.random.default_rng(0)
    batch = [random.integers(3, 2048, n).tolist() for n in (3, 100)]
    expected = [type(make_checkpoint("llama"))(DEMO, model).greedy(p, 24) for p in batch]
    async with serving(DEMO, tp=2, pp=2, block_size=16) as driver:
        results = await driver.run(*(driver.sequence(p, max_tokens=24, ignore_eos=True) for p in batch))
    assert [result.token_ids for result in results] == expected
