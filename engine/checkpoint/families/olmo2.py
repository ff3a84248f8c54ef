"""OLMo 2: norms after attention and MLP instead of before, and one norm over all heads of q, and of k."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from moonpool.engine.checkpoint.config import ModelConfig, Norms
from moonpool.engine.checkpoint.config_words import ConfigWords


def read(path: Path, raw: Mapping[str, Any]) -> ModelConfig:
    words = ConfigWords(path, raw, max_position_embeddings=2048, rms_norm_eps=1e-5)
    bias, decoder = words.flag("attention_bias"), words.decoder()
    return replace(
        decoder,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm="all",
        ropes=tuple(replace(rope, is_rounded=False) for rope in decoder.ropes),
        norms=Norms("", "post_attention_layernorm", "", "post_feedforward_layernorm"),
    )
