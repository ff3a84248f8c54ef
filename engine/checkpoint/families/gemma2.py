"""Gemma 2: soft caps, norms before and after attention and MLP, and a sliding window in every other layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from moonpool.engine.checkpoint.config import ModelConfig, Norms
from moonpool.engine.checkpoint.config_words import ConfigWords
from moonpool.engine.errors import UnsupportedModel


def read(path: Path, raw: Mapping[str, Any]) -> ModelConfig:
    words = ConfigWords(
        path, raw, max_position_embeddings=8192, attn_logit_softcapping=50.0, final_logit_softcapping=30.0
    )
    decoder = gemma(words)
    return replace(decoder, windows=words.windows({i: i % 2 == 0 for i in range(decoder.num_layers)}))


def gemma(words: ConfigWords) -> ModelConfig:
    """Return what Gemma 2 and 3 have in common."""
    defaults = {
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "tie_word_embeddings": True,
    }
    words.raw = {**defaults, **words.raw}
    if words.flag("use_bidirectional_attention"):
        raise UnsupportedModel(words.path, "use_bidirectional_attention: only causal attention is computed")
    decoder, bias = words.decoder("hidden_activation"), words.flag("attention_bias")
    return replace(
        decoder,
        qkv_bias=bias,
        o_bias=bias,
        norms=Norms(
            "input_layernorm",
            "post_attention_layernorm",
            "pre_feedforward_layernorm",
            "post_feedforward_layernorm",
        ),
        norm_offset=1.0,
        scale=float(words.raw["query_pre_attn_scalar"]) ** -0.5,
        soft_cap=float(words.raw.get("attn_logit_softcapping") or 0.0),
        logit_soft_cap=float(words.raw.get("final_logit_softcapping") or 0.0),
        embedding_scale=decoder.hidden_size**0.5,
    )
