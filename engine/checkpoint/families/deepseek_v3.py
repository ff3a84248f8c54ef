"""DeepSeek-V3 and R1: DeepSeek-V2 with sigmoid scores, corrected for the choice of experts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moonpool.engine.checkpoint.config import ModelConfig
from moonpool.engine.checkpoint.config_words import ConfigWords
from moonpool.engine.checkpoint.families.deepseek_v2 import deepseek


def read(path: Path, raw: Mapping[str, Any]) -> ModelConfig:
    words = ConfigWords(
        path,
        raw,
        max_position_embeddings=4096,
        moe_intermediate_size=2048,
        n_group=8,
        topk_group=4,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
    )
    return deepseek(words, "sigmoid", is_grouped=True, experts=256, dense=3)
