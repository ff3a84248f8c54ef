"""Qwen2-MoE: Qwen2 with a mixture and a gated shared expert."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from moonpool.engine.checkpoint.config import ModelConfig
from moonpool.engine.checkpoint.config_words import ConfigWords


def read(path: Path, raw: Mapping[str, Any]) -> ModelConfig:
    words = ConfigWords(
        path,
        raw,
        max_position_embeddings=32768,
        num_key_value_heads=16,
        sliding_window=4096,
        num_experts_per_tok=4,
        moe_intermediate_size=1408,
        shared_expert_intermediate_size=5632,
    )
    moe = words.mixture(60, shared_inter=words.size("shared_expert_intermediate_size"))
    return replace(
        words.decoder(), qkv_bias=words.flag("qkv_bias", default=True), windows=_windows(words), moe=moe
    )


def _windows(words: ConfigWords) -> tuple[int, ...]:
    """Return the windows: by layer_types, or of every other layer before max_window_layers."""
    num_layers = words.size("num_hidden_layers")
    if not words.flag("use_sliding_window"):
        return (0,) * num_layers
    border = int(words.raw.get("max_window_layers", 28))
    return words.windows({i: i % 2 == 0 and i < border for i in range(num_layers)})
