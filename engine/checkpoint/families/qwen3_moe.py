"""Qwen3-MoE: Qwen3 with a mixture; all layers have the sliding window, if any."""

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
        num_key_value_heads=4,
        sliding_window=4096,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
    )
    bias, decoder = words.flag("attention_bias"), words.decoder()
    return replace(
        decoder,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm="head",
        windows=words.windows() if words.flag("use_sliding_window") else decoder.windows,
        moe=words.mixture(128),
    )
