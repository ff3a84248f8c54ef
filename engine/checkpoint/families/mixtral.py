"""Mixtral: Mistral with a mixture of experts in every layer."""

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
        {**raw, "decoder_sparse_step": 1, "mlp_only_layers": None},
        max_position_embeddings=131072,
        num_key_value_heads=8,
        rms_norm_eps=1e-5,
        rope_theta=1e6,
        num_experts_per_tok=2,
    )
    moe = words.mixture(
        8,
        inter="intermediate_size",
        renormalize=True,
        block="block_sparse_moe",
        projections=("w1", "w3", "w2"),
    )
    return replace(words.decoder(), windows=words.windows(), moe=moe)
