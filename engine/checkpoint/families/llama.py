"""Llama 2, 3 and 3.1+."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from moonpool.engine.checkpoint.config import ModelConfig
from moonpool.engine.checkpoint.config_words import ConfigWords


def read(path: Path, raw: Mapping[str, Any]) -> ModelConfig:
    words = ConfigWords(path, raw, max_position_embeddings=2048)
    bias = words.flag("attention_bias")
    return replace(words.decoder(), qkv_bias=bias, o_bias=bias, mlp_bias=words.flag("mlp_bias"))
