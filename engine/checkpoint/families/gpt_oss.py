"""gpt-oss: mixtures with biases, attention sinks, a window in every other layer, and MXFP4 weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from moonpool.engine.checkpoint.config import ModelConfig
from moonpool.engine.checkpoint.config_words import ConfigWords
from moonpool.engine.checkpoint.fused import from_mxfp4, same
from moonpool.engine.checkpoint.weights import Derived
from moonpool.engine.errors import UnsupportedModel

_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 32.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def read(path: Path, raw: Mapping[str, Any]) -> ModelConfig:
    words = ConfigWords(
        path,
        raw,
        max_position_embeddings=131072,
        num_key_value_heads=8,
        head_dim=64,
        rms_norm_eps=1e-5,
        rope_theta=150000.0,
        sliding_window=128,
        num_experts_per_tok=4,
    )
    if not (raw.get("rope_parameters") or raw.get("rope_scaling")):
        words.raw["rope_parameters"] = _ROPE
    if (limit := words.raw.get("swiglu_limit", 7.0)) != 7.0:
        raise UnsupportedModel(path, f"swiglu_limit {limit}: only 7 is computed")
    decoder, bias = words.decoder(quantized="mxfp4"), words.flag("attention_bias", default=True)
    return replace(
        decoder,
        qkv_bias=bias,
        o_bias=bias,
        sinks=True,
        activation="clamped",
        windows=words.windows({i: i % 2 == 0 for i in range(decoder.num_layers)}),
        moe=words.mixture(128, inter="intermediate_size", renormalize=True, bias=True),
        derived=partial(_derived, packed=words.is_quantized("mxfp4")),
    )


def _derived(config: ModelConfig, packed: bool) -> dict[str, Derived]:
    """Experts are stored together, gate and up in turns."""
    assert config.moe is not None
    tensors: dict[str, Derived] = {}
    count, hidden, inter = config.moe.num_experts, config.hidden_size, config.moe.expert_inter
    for i in range(config.num_layers):
        block = f"model.layers.{i}.mlp"
        tensors[f"{block}.gate.weight"] = same(f"{block}.router.weight", (count, hidden))
        tensors[f"{block}.gate.bias"] = same(f"{block}.router.bias", (count,))
        for module, source, rows, columns, part in (
            ("gate_proj", "gate_up_proj", 2 * inter, hidden, slice(0, None, 2)),
            ("up_proj", "gate_up_proj", 2 * inter, hidden, slice(1, None, 2)),
            ("down_proj", "down_proj", hidden, inter, slice(None)),
        ):
            stored = f"{block}.experts.{source}"
            biases = {f"{stored}_bias": (count, rows)}
            weights: dict[str, tuple[int, ...]] = {stored: (count, columns, rows)}
            if packed:
                weights = {
                    f"{stored}_blocks": (count, rows, columns // 32, 16),
                    f"{stored}_scales": (count, rows, columns // 32),
                }
            for e in range(count):
                name = f"{block}.experts.{e}.{module}"
                tensors[f"{name}.bias"] = Derived(biases, partial(_bias, e=e, part=part))
                tensors[f"{name}.weight"] = Derived(
                    weights, partial(_unpacked if packed else _weight, e=e, part=part)
                )
    return tensors


def _bias(biases: Tensor, e: int, part: slice) -> Tensor:
    return biases[e, part]


def _weight(weights: Tensor, e: int, part: slice) -> Tensor:
    return weights[e, :, part].T


def _unpacked(blocks: Tensor, scales: Tensor, e: int, part: slice) -> Tensor:
    return from_mxfp4(blocks[e, part], scales[e, part])
