"""Qwen2-MoE: Qwen2 with a mixture and a gated shared expert."""

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
        num_key_value_heads=16,
        sliding_window=4096,
        num_experts_per_tok=4,
        moe_intermediate_size=1408,
        shared_expert_intermediate_size=5632,
    )
    moe = words.mixture(60, shared_inter=words.size("shared_expert_intermediate_size"))
    return replace(
        words.decoder(),
        qkv_bias=words.flag("qkv_bias", default=True),
        windows=windows(words, every_other=True),
        moe=moe,
    )
