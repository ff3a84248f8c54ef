"""GLM-4: norms before and after attention and MLP; half of a head is rotated, in adjacent pairs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from moonpool.engine.checkpoint.config import ModelConfig, Norms
from moonpool.engine.checkpoint.config_words import ConfigWords
from moonpool.engine.checkpoint.fused import half_split, split_rows
from moonpool.engine.checkpoint.weights import Derived


def read(path: Path, raw: Mapping[str, Any]) -> ModelConfig:
    words = ConfigWords(
        path,
        raw,
        max_position_embeddings=131072,
        num_key_value_heads=2,
        head_dim=128,
        rms_norm_eps=0.00000015625,
        partial_rotary_factor=0.5,
    )
    return replace(
        words.decoder(partial_rotary=True),
        qkv_bias=words.flag("attention_bias", default=True),
        norms=Norms(
            "input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"
        ),
        derived=_derived,
    )


def _derived(config: ModelConfig) -> dict[str, Derived]:
    tensors: dict[str, Derived] = {}
    rotary_dim = int(config.head_dim * config.ropes[0].rotary_factor)
    for i in range(config.num_layers):
        attention, mlp = f"model.layers.{i}.self_attn", f"model.layers.{i}.mlp"
        for module, num_heads in ("q_proj", config.num_heads), ("k_proj", config.num_kv_heads):
            rows = num_heads * config.head_dim
            for kind, shape in ("weight", (rows, config.hidden_size)), ("bias", (rows,)):
                name = f"{attention}.{module}.{kind}"
                tensors[name] = half_split(name, shape, config.head_dim, rotary_dim)
        sizes = {f"{mlp}.{part}_proj.weight": config.intermediate_size for part in ("gate", "up")}
        tensors |= split_rows(f"{mlp}.gate_up_proj.weight", sizes, config.hidden_size)
    return tensors
