"""Mistral: Llama with a sliding window in every layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from moonpool.engine.checkpoint.config import ModelConfig
from moonpool.engine.checkpoint.config_words import ConfigWords


def read(path: Path, raw: Mapping[str, Any]) -> ModelConfig:
    words = ConfigWords(path, raw, max_position_embeddings=131072, num_key_value_heads=8, sliding_window=4096)
    return replace(words.decoder(), windows=words.windows())
