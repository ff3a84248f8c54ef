"""Qwen2 and Qwen2.5: biases of q, k and v; later layers may have a sliding window."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from moonpool.engine.checkpoint.config import ModelConfig
from moonpool.engine.checkpoint.config_words import ConfigWords


def read(path: Path, raw: Mapping[str, Any]) -> ModelConfig:
    words = ConfigWords(path, raw, max_position_embeddings=32768, num_key_value_heads=32, sliding_window=4096)
    return replace(words.decoder(), qkv_bias=True, windows=windows(words))


def windows(words: ConfigWords, *, every_other: bool = False) -> tuple[int, ...]:
    """Return the windows, which need use_sliding_window: by layer_types, or from max_window_layers on.
    ``every_other``: of every other layer before max_window_layers instead."""
    num_layers = words.size("num_hidden_layers")
    if not words.flag("use_sliding_window"):
        return (0,) * num_layers
    border = int(words.raw.get("max_window_layers", 28))
    if every_other:
        return words.windows({i: i % 2 == 0 and i < border for i in range(num_layers)})
    return words.windows({i: i >= border for i in range(num_layers)})
