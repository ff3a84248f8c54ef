"""Phi-3 and Phi-4: q, k and v are one matrix, as are gate and up; part of a head is rotated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from moonpool.engine.checkpoint.config import ModelConfig
from moonpool.engine.checkpoint.config_words import ConfigWords
from moonpool.engine.checkpoint.fused import split_rows
from moonpool.engine.checkpoint.weights import Derived


def read(path: Path, raw: Mapping[str, Any]) -> ModelConfig:
    rope = dict(raw.get("rope_scaling") or raw.get("rope_parameters") or {})
    kind = rope.pop("type", None) or rope.get("rope_type", "default")
    # The first files had other names for it.
    rope["rope_type"] = "longrope" if kind in ("su", "yarn") else kind
    raw = {**raw, "rope_scaling": None, "rope_parameters": rope}
    words = ConfigWords(path, raw, max_position_embeddings=4096, rms_norm_eps=1e-5)
    return replace(words.decoder(partial_rotary=True), windows=words.windows(), derived=_derived)


def _derived(config: ModelConfig) -> dict[str, Derived]:
    tensors: dict[str, Derived] = {}
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    for i in range(config.num_layers):
        attention, mlp = f"model.layers.{i}.self_attn", f"model.layers.{i}.mlp"
        sizes = {f"{attention}.{part}_proj.weight": kv_size for part in "qkv"}
        sizes[f"{attention}.q_proj.weight"] = q_size
        tensors |= split_rows(f"{attention}.qkv_proj.weight", sizes, config.hidden_size)
        sizes = {f"{mlp}.{part}_proj.weight": config.intermediate_size for part in ("gate", "up")}
        tensors |= split_rows(f"{mlp}.gate_up_proj.weight", sizes, config.hidden_size)
    return tensors
