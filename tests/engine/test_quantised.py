"""Weights in few bits: each format means what its tool wrote, whole and split; others are refused."""

from __future__ import annotations

import json
from pathlib import Path
from shutil import copytree
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from moonpool.engine.checkpoint.config import ModelConfig
from moonpool.engine.device.device import CpuDevice
from moonpool.engine.engine import Engine
from moonpool.engine.errors import CheckpointError, UnsupportedModel
from moonpool.kernels.reference import QuantisedWeight
from moonpool.runtime.config.options import EngineOptions, ModelOptions
from moonpool.runtime.errors import ConfigError
from tests.engine.adapters import make_adapter
from tests.engine.conftest import Reference
from tests.engine.quantised_files import FORMATS, plain_model, write
from tests.engine.ranks.conftest import ranks, serving
from tests.engine.test_adapters import exact

# Of log probabilities: x is rounded to 16 bits a segment, in each of 21 matrices.
TOLERANCE = 5e-3
LENGTHS = (1, 9, 23, 40)
# Int4 in groups of 16, for which GPUs have no kernel: they compute with the plain weights.
PLAIN_ON_GPUS = {"gptq", "gptq-v2", "gptq-act-order", "awq", "packed-int4", "packed-int4-asymmetric"}


def prompts() -> list[list[int]]:
    random = np.random.default_rng(0)
    return [random.integers(0, 160, n).tolist() for n in LENGTHS]


async def assert_exact(driver: Any, meant: Reference) -> None:
    sequences = [driver.sequence(prompt, max_tokens=12, num_logprobs=160) for prompt in prompts()]
    for prompt, result in zip(prompts(), await driver.run(*sequences), strict=True):
        assert result.token_ids == meant.greedy(prompt, 12)
        expected = meant.logprobs(prompt + result.token_ids)[len(prompt) - 1 : -1]
        events = [event for event in result.events if event.token_id >= 0]
        for event, row in zip(events, expected, strict=True):
            assert abs(event.logprobs.logprob - float(row[event.token_id])) < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
async def test_a_format_means_what_its_tool_wrote(
    name: str, make_checkpoint: Any, serve: Any, tmp_path: Path
) -> None:
    """One module is not quantised, as tools leave some out."""
    meant = write(name, make_checkpoint("llama"), tmp_path, skip=("1.mlp.up_proj",))
    async with serve(meant.path, max_batch_tokens=24) as driver:
        await assert_exact(driver, meant)
        nbytes = driver.engine._loop.runner.model.layers[0].qkv.nbytes
        plain = driver.engine.device.torch.type == "cuda" and name in PLAIN_ON_GPUS
        assert (nbytes < 0.6 * 4 * 160 * 48) is not plain


@pytest.mark.parametrize(
    ("name", "family", "words"),
    [
        ("packed-int4", "phi3", {}),
        ("gptq", "glm4", {}),
        ("awq", "qwen2", {}),
        ("fp8-blocks", "qwen3_moe", {}),
        ("fp8-blocks", "deepseek_v3", {}),
        ("int8", "gemma2", {"sliding_window": 12}),
    ],
)
async def test_families(
    name: str, family: str, words: dict[str, Any], make_checkpoint: Any, serve_on: Any, tmp_path: Path
) -> None:
    """Fused and reordered matrices, biases, experts, latents."""
    meant = write(name, make_checkpoint(family, **words), tmp_path)
    async with serve_on(CpuDevice(), meant.path) as driver:
        await assert_exact(driver, meant)


def rounded(plain: Reference, kind: str, path: Path) -> Reference:
    """The model that ``engine.weights`` means: a matrix is the rounded whole one, the head has 8 bits."""
    tensors = load_file(plain.path / "model.safetensors")
    for name, weight in tensors.items():
        if name.endswith("_proj.weight"):
            tensors[name] = QuantisedWeight.of(weight, kind, 64 if kind == "int4" else 0).dequantised()
    tensors["lm_head.weight"] = QuantisedWeight.of(tensors["lm_head.weight"], "int8").dequantised()
    return Reference(plain.path, plain_model(plain.path, tensors, path / "meant"))


@pytest.mark.parametrize("kind", ["int8", "int4"])
async def test_weights_rounded_at_load(kind: str, make_checkpoint: Any, serve: Any, tmp_path: Path) -> None:
    plain = make_checkpoint("llama")
    async with serve(plain.path, weights=kind) as driver:
        await assert_exact(driver, rounded(plain, kind, tmp_path))


async def test_an_experts_weights_rounded_at_load(
    make_checkpoint: Any, serve_on: Any, tmp_path: Path
) -> None:
    """Routers stay plain."""
    plain = make_checkpoint("qwen3_moe")
    async with serve_on(CpuDevice(), plain.path, weights="int8") as driver:
        await assert_exact(driver, rounded(plain, "int8", tmp_path))


# Columns of a rank that begin within a group of inputs, in another order, and within a block.
@pytest.mark.parametrize("name", ["packed-int4", "gptq-act-order", "fp8-blocks", "awq"])
async def test_split_over_ranks(name: str, make_checkpoint: Any, tmp_path: Path) -> None:
    meant = write(name, make_checkpoint("llama"), tmp_path / name)
    async with ranks(2) as group, serving(meant.path, group, tp=2) as driver:
        await assert_exact(driver, meant)


@pytest.mark.parametrize("kind", ["int8", "int4"])
async def test_rounding_does_not_depend_on_the_plan(kind: str, make_checkpoint: Any, tmp_path: Path) -> None:
    """The weights of a block's key are the same on nodes of every plan."""
    plain = make_checkpoint("llama")
    meant = rounded(plain, kind, tmp_path)
    async with ranks(2) as group, serving(plain.path, group, tp=2, weights=kind) as driver:
        await assert_exact(driver, meant)


# Matrices in one piece, and side by side with one that is plain.
PARTLY_PLAIN = ("1.mlp.up_proj", "0.self_attn.k_proj")


@pytest.mark.parametrize("name", ["gptq-act-order", "awq", "packed-int4", "fp8-blocks"])
async def test_adapters(name: str, make_checkpoint: Any, serve_on: Any, tmp_path: Path) -> None:
    """Each gives the tokens of the plain model that the weights mean, with the adapter merged."""
    meant = write(name, make_checkpoint("llama"), tmp_path / "model", skip=PARTLY_PLAIN)
    adapters = {"all": make_adapter(meant, tmp_path / "adapter")}
    async with serve_on(CpuDevice(), meant.path) as driver:
        await exact(driver, meant, adapters)


async def test_adapters_of_weights_rounded_at_load_over_ranks(make_checkpoint: Any, tmp_path: Path) -> None:
    plain = make_checkpoint("llama")
    meant = rounded(plain, "int4", tmp_path)
    adapters = {"all": make_adapter(meant, tmp_path / "adapter")}
    async with ranks(2) as group, serving(plain.path, group, tp=2, weights="int4") as driver:
        await exact(driver, meant, adapters)


def test_other_weights_have_another_fingerprint(make_checkpoint: Any, tmp_path: Path) -> None:
    """It is the root of block keys: KV of other weights is other KV."""
    plain = make_checkpoint("llama")
    stored = [write(name, plain, tmp_path / name).path for name in ("gptq", "gptq-v2", "int8")]
    models = [(plain.path, weights) for weights in ("auto", "int8", "int4")]
    models += [(path, "auto") for path in stored]
    found = [
        Engine(path, EngineOptions(weights=weights), ModelOptions(device="cpu")).model_fingerprint
        for path, weights in models
    ]
    assert len(set(found)) == len(models)
    assert found[0] == ModelConfig.from_checkpoint(plain.path).fingerprint()


WORDS = {name: words for name, (words, _) in FORMATS.items()}


def transformed(*locations: str) -> object:
    return {"config_groups": {"v": {"type": "hadamard", "apply": [{"location": one} for one in locations]}}}


REFUSED: dict[str, tuple[object, str]] = {
    "method": (
        {"quant_method": "bitsandbytes"},
        "'bitsandbytes' is not one of awq, compressed-tensors, fp8, gptq",
    ),
    "none": ({}, "None is not one of awq, compressed-tensors, fp8, gptq"),
    "no words": ("int8", "None is not one of"),
    "bits": ({**WORDS["gptq"], "bits": 3}, "weights of 3 bits: only 4 and 8 are read"),
    "gptq format": ({**WORDS["gptq"], "checkpoint_format": "marlin"}, "'marlin' is not gptq or gptq_v2"),
    "awq version": ({**WORDS["awq"], "version": "gemv"}, "awq version 'gemv' is not gemm"),
    "awq bits": ({**WORDS["awq"], "bits": 8}, "awq with bits 8: only 4 are read"),
    "format": (
        {**WORDS["int8"], "format": "marlin-24"},
        "'marlin-24' is not one of pack-quantized, int-quantized",
    ),
    "transform": (
        {**WORDS["int8"], "transform_config": transformed("weight_input", "input")},
        "transform v: activations are not rotated in steps",
    ),
    "sparsity": (
        {**WORDS["int8"], "sparsity_config": {"format": "sparse-24-bitmask"}},
        "sparsity 'sparse-24-bitmask': only dense is read",
    ),
    "floats": (
        {**WORDS["int8"], "config_groups": {"group_0": {"weights": {"type": "float", "num_bits": 4}}}},
        "floats of 4 bits: only 8 are read",
    ),
    "activations": (
        {**WORDS["int8"], "config_groups": {"a": {"weights": None}}},
        "a: it quantises no weights",
    ),
    "fp8 format": ({"quant_method": "fp8", "fmt": "e5m2"}, "'e5m2' is not e4m3"),
    "fp8 block": (
        {"quant_method": "fp8", "weight_block_size": [128]},
        "weight_block_size .* is not two sizes",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_unknown_scheme_is_refused_by_name(name: str, make_checkpoint: Any, tmp_path: Path) -> None:
    words, message = REFUSED[name]
    path = copytree(make_checkpoint("llama").path, tmp_path / "model")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "quantization_config": words}))
    with pytest.raises(UnsupportedModel, match=message):
        ModelConfig.from_checkpoint(path)


def test_rotations_of_stored_weights_are_read(make_checkpoint: Any, tmp_path: Path) -> None:
    path = write("int8", make_checkpoint("llama"), tmp_path).path
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"]["transform_config"] = transformed("weight_input", "weight_output")
    (path / "config.json").write_text(json.dumps(config))
    assert ModelConfig.from_checkpoint(path).weights is not None


def test_a_missing_word_is_named(make_checkpoint: Any, tmp_path: Path) -> None:
    path = copytree(make_checkpoint("llama").path, tmp_path / "model")
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="quantization_config has no group_size"):
        ModelConfig.from_checkpoint(path)


@pytest.mark.parametrize("name", ["gptq", "packed-int4", "fp8-blocks", "int8"])
async def test_tensors_that_do_not_fit_the_model_are_named(
    name: str, make_checkpoint: Any, serve_on: Any, tmp_path: Path
) -> None:
    path = write(name, make_checkpoint("llama"), tmp_path).path
    tensors = load_file(path / "model.safetensors")
    scale = next(key for key in tensors if ".1.mlp.down_proj." in key and "scale" in key)
    tensors[scale] = tensors[scale][:1].repeat(7, 7)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"1\.mlp\.down_proj"):
        async with serve_on(CpuDevice(), path):
            pass


def test_groups_of_unequal_size_are_refused(make_checkpoint: Any, tmp_path: Path) -> None:
    path = write("gptq-act-order", make_checkpoint("llama"), tmp_path).path
    tensors = load_file(path / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.g_idx"][:20] = 0
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    engine = Engine(path, EngineOptions(), ModelOptions(device="cpu"))
    with pytest.raises(CheckpointError, match="g_idx has groups that are not of 16 inputs"):
        engine.setup.load(8, None, lambda *_: None)


def test_weights_in_few_bits_are_not_rounded_again(make_checkpoint: Any, tmp_path: Path) -> None:
    path = write("gptq", make_checkpoint("llama"), tmp_path).path
    with pytest.raises(
        UnsupportedModel, match=r"quantised already \(gptq, 4 bits\): set engine.weights to auto"
    ):
        Engine(path, EngineOptions(weights="int8"), ModelOptions(device="cpu"))
    with pytest.raises(ConfigError, match=r"engine\.weights must be one of auto, int8, int4"):
        EngineOptions(weights="int3")


def test_weights_take_the_memory_of_their_bits(make_checkpoint: Any) -> None:
    """Codes and scales, and nothing else: the plain matrix is not kept."""
    nbytes = {}
    for weights in ("auto", "int8", "int4"):
        engine = Engine(
            make_checkpoint("llama").path, EngineOptions(weights=weights), ModelOptions(device="cpu")
        )
        model = engine.setup.load(8, None, lambda *_: None).model
        layer = model.layers[0]
        nbytes[weights] = layer.qkv.nbytes + layer.o.nbytes + layer.mlp.gate_up.nbytes + layer.mlp.down.nbytes
    assert nbytes["int8"] < 0.35 * nbytes["auto"]
    assert nbytes["int4"] < 0.25 * nbytes["auto"]
