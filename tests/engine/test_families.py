"""The engine computes what transformers computes, whatever the batch, the blocks and the cache."""

from __future__ import annotations

import copy
import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from moonpool.runtime.config.options import ModelOptions
from tests.lazily import Lazily

transformers = Lazily("transformers")

FAMILIES = {
    "llama": ("llama", {}),
    "llama-tied-mha": ("llama", {"num_key_value_heads": 6, "tie_word_embeddings": True}),
    "llama-mqa-biases": ("llama", {"num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True}),
    "llama-odd-head": ("llama", {"head_dim": 22, "hidden_size": 54, "num_attention_heads": 6}),
    "llama3": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    "linear": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
    "mistral": ("mistral", {"sliding_window": 12}),
    "mistral-full": ("mistral", {"sliding_window": None, "head_dim": 32}),
    "qwen2": ("qwen2", {}),
    "qwen2-window": ("qwen2", {"use_sliding_window": True, "sliding_window": 12, "max_window_layers": 1}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "qwen3-yarn": (
        "qwen3",
        {
            "attention_bias": True,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "mixtral": ("mixtral", {"head_dim": None, "sliding_window": 12}),
    "qwen2-moe": ("qwen2_moe", {}),
    "qwen2-moe-mixed": (
        "qwen2_moe",
        {
            "norm_topk_prob": True,
            "qkv_bias": False,
            "mlp_only_layers": [1],
            "use_sliding_window": True,
            "sliding_window": 12,
        },
    ),
    "qwen3-moe": ("qwen3_moe", {"norm_topk_prob": True}),
    "qwen3-moe-mixed": (
        "qwen3_moe",
        {
            "decoder_sparse_step": 2,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 12,
        },
    ),
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.1, 1.3, 1.6],
    "long_factor": [1.5, 3.0, 4.0, 5.0],
}
FAMILIES |= {
    "olmo2": ("olmo2", {}),
    "olmo2-biases": ("olmo2", {"attention_bias": True, "tie_word_embeddings": True}),
    "gemma2": (
        "gemma2",
        {
            "hidden_activation": "gelu_pytorch_tanh",
            "sliding_window": 12,
            "query_pre_attn_scalar": 20,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 2.0,
        },
    ),
    "gemma3": (
        "gemma3_text",
        {
            "num_hidden_layers": 4,
            "layer_types": None,
            "sliding_window": 12,
            "sliding_window_pattern": 3,
            "query_pre_attn_scalar": 20,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "phi3": ("phi3", {"head_dim": 8, "sliding_window": 12}),
    "phi3-short": (
        "phi3",
        {"head_dim": 8, "rope_parameters": LONGROPE | {"original_max_position_embeddings": 256}},
    ),
    "phi4": ("phi3", {"head_dim": 8, "partial_rotary_factor": 0.75, "tie_word_embeddings": True}),
    "glm4": ("glm4", {}),
    "deepseek-v2": ("deepseek_v2", {"routed_scaling_factor": 1.5}),
    "deepseek-v2-lite": ("deepseek_v2", {"topk_method": "greedy", "first_k_dense_replace": 0}),
    "deepseek-v3": ("deepseek_v3", {}),
    "deepseek-v3-yarn": (
        "deepseek_v3",
        {
            "q_lora_rank": None,
            "rope_interleave": False,
            "attention_bias": True,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
                "mscale": 0.7,
                "mscale_all_dim": 1.0,
            },
        },
    ),
    "gpt-oss": (
        "gpt_oss",
        {
            "sliding_window": 12,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "truncate": False,
                "original_max_position_embeddings": 64,
            },
        },
    ),
}
# One of each kind of attention and of mixture. The others take three times as long: `make test-slow`.
QUICK = ("llama", "mistral", "qwen3", "mixtral", "gemma3", "deepseek-v3", "gpt-oss")
ALL = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in FAMILIES]
# With blocks of 8: shorter than, equal to and across block borders.
LENGTHS = (1, 5, 8, 9, 16, 23, 40)


def prompts(seed: int = 0) -> list[list[int]]:
    random = np.random.default_rng(seed)
    return [random.integers(0, 160, n).tolist() for n in LENGTHS]


@pytest.mark.parametrize("name", ALL)
async def test_greedy_tokens_equal_transformers(name, make_checkpoint, serve):
    family, words = FAMILIES[name]
    reference = make_checkpoint(family, **words)
    expected = reference.greedy_each(prompts(), 20)
    async with serve(reference.path, max_batch_tokens=32) as driver:
        # A batch of mixed lengths, in chunks of at most 32 tokens beside the decodes; then each on its own,
        # all of it from the cache; then continued from the cache.
        sequences = [driver.sequence(prompt, max_tokens=20) for prompt in prompts()]
        results = await driver.run(*sequences)
        assert [result.token_ids for result in results] == expected
        for prompt, tokens in zip(prompts(), expected, strict=True):
            again, longer = (
                driver.sequence(prompt, max_tokens=20),
                driver.sequence(prompt + tokens[:11], num_prompt_tokens=len(prompt), max_tokens=20),
            )
            (result,) = await driver.run(again)
            assert result.token_ids == tokens
            assert again.num_cached_tokens == (len(prompt) - 1) // 8 * 8
            driver.results[longer.key] = type(result)(token_ids=tokens[:11])
            (result,) = await driver.run(longer)
            assert result.token_ids == tokens
            assert longer.num_cached_tokens == (len(prompt) + 10) // 8 * 8


@pytest.mark.parametrize("name", FAMILIES)
async def test_logprobs_equal_transformers(name, make_checkpoint, serve):
    family, words = FAMILIES[name]
    reference = make_checkpoint(family, **words)
    async with serve(reference.path, max_batch_tokens=24) as driver:
        sequences = [driver.sequence(p, max_tokens=9, num_logprobs=160) for p in prompts(1)]
        for prompt, result in zip(prompts(1), await driver.run(*sequences), strict=True):
            expected = reference.logprobs(prompt + result.token_ids)[len(prompt) - 1 : -1]
            for event, row in zip(result.events[-9:], expected, strict=True):
                actual = torch.empty(160)
                actual[event.logprobs.top_ids] = torch.tensor(event.logprobs.top_logprobs)
                torch.testing.assert_close(actual, row, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen2_moe"])
async def test_half_precision_stays_within_its_rounding(family, dtype, make_checkpoint, serve):
    """In 16 bits the order of additions shows: errors are compared with those transformers makes."""
    # Which of two near-equal experts is chosen would be rounding of another kind: all are.
    words = {"num_experts_per_tok": 8} if family == "qwen2_moe" else {}
    reference = make_checkpoint(family, dtype=dtype, **words)
    exact = transformers.AutoModelForCausalLM.from_pretrained(reference.path, dtype=torch.float32)
    prompt = prompts(2)[-1]
    async with serve(reference.path, dtype=dtype) as driver:
        (result,) = await driver.run(driver.sequence(prompt, max_tokens=8, num_logprobs=160))
    ids = torch.tensor([prompt + result.token_ids])
    with torch.inference_mode():
        rows = exact(ids).logits[0].log_softmax(-1)[len(prompt) - 1 : -1]
        theirs = reference.model(ids).logits[0].float().log_softmax(-1)[len(prompt) - 1 : -1]
    ours = torch.empty(8, 160)
    for i, event in enumerate(result.events[-8:]):
        ours[i, event.logprobs.top_ids] = torch.tensor(event.logprobs.top_logprobs)
    assert (ours - rows).abs().max() < 2 * (theirs - rows).abs().max()
    assert (ours - rows).abs().mean() < 1.3 * (theirs - rows).abs().mean()


@pytest.mark.parametrize("tied", [False, True])
async def test_bfloat16_checkpoint_computed_in_float32(make_checkpoint, serve, tied):
    """What ``auto`` does on a CPU: exactly transformers' float32 forward over the stored weights."""
    reference = make_checkpoint("llama", dtype="bfloat16", tie_word_embeddings=tied)
    exact = transformers.AutoModelForCausalLM.from_pretrained(reference.path, dtype=torch.float32)
    prompt = prompts(3)[-1]
    async with serve(reference.path) as driver:
        assert driver.engine.dtype == "float32"
        (result,) = await driver.run(driver.sequence(prompt, max_tokens=24))
    assert result.token_ids == type(reference)(reference.path, exact).greedy(prompt, 24)


async def test_prompt_logprobs_equal_transformers(make_checkpoint, serve):
    reference = make_checkpoint("llama")
    prompt = prompts(4)[-1]
    expected = reference.logprobs(prompt)[:-1].gather(-1, torch.tensor(prompt)[1:, None])[:, 0]
    async with serve(reference.path, max_batch_tokens=16) as driver:
        await driver.run(driver.sequence(prompt, max_tokens=1))
        sequence = driver.sequence(prompt, max_tokens=3, prompt_logprobs=True, num_logprobs=2)
        (result,) = await driver.run(sequence)
    (reported,) = [e.prompt_logprobs for e in result.events if e.prompt_logprobs is not None]
    assert sequence.num_cached_tokens == 0, "every prompt token has to be computed"
    torch.testing.assert_close(torch.tensor([r.logprob for r in reported]), expected, atol=1e-4, rtol=1e-4)
    assert all(len(row.top_ids) == 2 and row.top_logprobs[0] >= row.logprob for row in reported)


@pytest.mark.parametrize("max_model_len", [None, 64])
async def test_longrope_by_the_longest_sequence(make_checkpoint, serve, max_model_len) -> None:
    """As transformers, for texts within the original length and for longer ones; their blocks are not
    exchanged."""
    rope = LONGROPE | {"original_max_position_embeddings": 64, "partial_rotary_factor": 0.5}
    rope |= {name: rope[name][:2] for name in ("short_factor", "long_factor")}
    reference = make_checkpoint("phi3", head_dim=8, rope_parameters=rope, original_max_position_embeddings=64)
    prompt = np.random.default_rng(0).integers(0, 160, 30 if max_model_len else 70).tolist()
    options = {"max_model_len": max_model_len} if max_model_len else {}
    async with serve(reference.path, max_batch_tokens=24, **options) as driver:
        (result,) = await driver.run(driver.sequence(prompt, max_tokens=20))
        assert ("long rotary" in str(driver.engine.layout)) == (max_model_len is None)
    assert result.token_ids == reference.greedy(prompt, 20)


async def test_mxfp4_weights_give_the_tokens_of_their_values(make_checkpoint, serve, tmp_path) -> None:
    from transformers.integrations.mxfp4 import _convert_moe_packed_tensors as values_of

    sizes = {"hidden_size": 64, "intermediate_size": 96}
    reference = make_checkpoint("gpt_oss", **FAMILIES["gpt-oss"][1], **sizes)
    path = tmp_path / "packed"
    shutil.copytree(reference.path, path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}}))
    tensors = load_file(path / "model.safetensors")
    model = copy.deepcopy(reference.model)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        count, columns, rows = tensors.pop(name).shape
        blocks = torch.randint(0, 256, (count, rows, columns // 32, 16), dtype=torch.uint8)
        scales = torch.randint(121, 126, blocks.shape[:3], dtype=torch.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        with torch.no_grad():
            model.get_parameter(name).copy_(values_of(blocks, scales, dtype=torch.float32))
    save_file(tensors, path / "model.safetensors")
    async with serve(path) as driver:
        (result,) = await driver.run(driver.sequence(prompts()[-1], max_tokens=20))
    assert result.token_ids == type(reference)(path, model).greedy(prompts()[-1], 20)


DEMO = ModelOptions().directory


async def test_demo_model_greedy_equals_transformers(serve):
    model = transformers.AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
    random = np.random.default_rng(0)
    batch = [random.integers(3, 2048, n).tolist() for n in (3, 16, 100)]
    async with serve(DEMO, block_size=16) as driver:
        results = await driver.run(*(driver.sequence(p, max_tokens=48, ignore_eos=True) for p in batch))
    for prompt, result in zip(batch, results, strict=True):
        ids = torch.tensor([prompt])
        expected = model.generate(
            ids, max_new_tokens=48, min_new_tokens=48, do_sample=False, eos_token_id=None
        )
        assert result.token_ids == expected[0, len(prompt) :].tolist()
