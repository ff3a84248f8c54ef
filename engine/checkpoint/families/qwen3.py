"""Qwen3: a norm of each query and key head instead of Qwen2's biases."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from moonpool.engine.checkpoint.config import ModelConfig
from moonpool.engine.checkpoint.config_words import ConfigWords
from moonpool.engine.checkpoint.families.qwen2 import windows


def read(path: Path, raw: Mapping[str, Any]) -> ModelConfig:
    words = ConfigWords(
        path,
        raw,
        max_position_embeddings=32768,
        num_key_value_heads=32,
        sliding_window=4096,
        head_dim=128,
    )
    bias = words.flag("attention_bias")
    return replace(words.decoder(), qkv_bias=bias, o_bias=bias, qk_norm="head", windows=windows(words))
