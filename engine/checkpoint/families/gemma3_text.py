"""Gemma 3, text: Gemma 2 with norms of q and k instead of caps, and two rotary bases; five of six layers
slide."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from moonpool.engine.checkpoint.config import ModelConfig
from moonpool.engine.checkpoint.config_words import ConfigWords
from moonpool.engine.checkpoint.families.gemma2 import gemma
from moonpool.engine.checkpoint.rope import RopeConfig


def read(path: Path, raw: Mapping[str, Any]) -> ModelConfig:
    words = ConfigWords(path, raw, max_position_embeddings=131072)
    decoder = gemma(words)
    pattern = words.size("sliding_window_pattern", 6)
    by_default = {i: (i + 1) % pattern > 0 for i in range(decoder.num_layers)}
    kinds = words.raw.get("layer_types") or [
        "sliding_attention" if by_default[i] else "full_attention" for i in by_default
    ]
    windows = words.windows(by_default)
    ropes = {
        kind: RopeConfig.from_words(path, _rope(words.raw, kind), decoder.max_position) for kind in set(kinds)
    }
    return replace(decoder, qk_norm="head", windows=windows, ropes=tuple(ropes[kind] for kind in kinds))


def _rope(raw: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Return the fields of one kind of layer: of rope_parameters, or as older files have them."""
    parameters = raw.get("rope_parameters") or {}
    is_full = kind == "full_attention"
    theta = raw.get("rope_theta", 1e6) if is_full else raw.get("rope_local_base_freq", 1e4)
    scaling = raw.get("rope_scaling") if is_full else None
    return {"rope_parameters": {"rope_theta": theta, **(parameters.get(kind) or scaling or {})}}
