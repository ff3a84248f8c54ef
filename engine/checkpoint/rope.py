"""Rotary position embedding: frequencies of each scaling, and the tables for kernels."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moonpool.engine.errors import CheckpointError, UnsupportedModel


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """``kind``: transformers' rope_type. Other fields are used by some kinds."""

    kind: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0  # multiplies cos and sin
    truncate: bool = True
    short_factors: tuple[float, ...] = ()  # by frequency, of longrope
    long_factors: tuple[float, ...] = ()
    is_long: bool = False  # longrope: sequences may be longer than original_max_position
    rotary_factor: float = 1.0  # the fraction of a head that is rotated
    is_rounded: bool = True  # cos and sin have the dtype of computation, as in most models of transformers

    @classmethod
    def from_words(
        cls, path: Path, raw: Mapping[str, Any], max_position: int, *, partial: bool = False
    ) -> RopeConfig:
        """Read ``rope_parameters`` (transformers 5), or ``rope_theta`` and ``rope_scaling``, of config.json.

        ``partial``: the family rotates ``partial_rotary_factor`` of a head.

        Raises UnsupportedModel for an unknown kind, CheckpointError for a missing field.
        """
        words: dict[str, Any] = {**(raw.get("rope_scaling") or raw.get("rope_parameters") or {})}
        kind = str(words.get("rope_type") or words.get("type") or "default")
        if kind not in _FREQUENCIES:
            raise UnsupportedModel(path, f"rope type {kind!r}: only {', '.join(_FREQUENCIES)} are computed")
        rotary_factor = float(words.get("partial_rotary_factor") or raw.get("partial_rotary_factor") or 1.0)
        if rotary_factor != 1.0 and not partial:
            raise UnsupportedModel(path, "partial_rotary_factor: only whole heads are rotated")
        theta = words.get("rope_theta") or raw.get("rope_theta") or 10000.0
        original = int(
            words.get("original_max_position_embeddings")
            or raw.get("original_max_position_embeddings")
            or max_position
        )
        factor = words.get("factor")
        if factor is None and kind in ("yarn", "longrope"):
            factor = max_position / original
        missing = [name for name in _NEEDED.get(kind, ()) if name not in words]
        if factor is None and kind != "default":
            missing.append("factor")
        if missing:
            raise CheckpointError(path, f"config.json: rope type {kind} needs {', '.join(missing)}")
        return cls(
            kind=kind,
            theta=float(theta),
            factor=float(factor or 1.0),
            original_max_position=original,
            low_freq_factor=float(words.get("low_freq_factor", 1.0)),
            high_freq_factor=float(words.get("high_freq_factor", 4.0)),
            beta_fast=float(words.get("beta_fast") or 32.0),
            beta_slow=float(words.get("beta_slow") or 1.0),
            attention_factor=_attention_factor(kind, words, float(factor or 1.0), original),
            short_factors=tuple(words.get("short_factor", ())),
            long_factors=tuple(words.get("long_factor", ())),
            truncate=bool(words.get("truncate", True)),
            rotary_factor=rotary_factor,
        )


def rope_tables(
    rope: RopeConfig, head_dim: int, max_position: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return cos and sin: float32 [max_position, rotated dimensions / 2], rounded to ``dtype`` where
    transformers does so: finer values would change the logits."""
    frequencies = _FREQUENCIES[rope.kind](rope, int(head_dim * rope.rotary_factor))
    dtype = dtype if rope.is_rounded else torch.float32
    angles = torch.outer(torch.arange(max_position, dtype=torch.float32), frequencies)
    cos = (angles.cos() * rope.attention_factor).to(dtype).float()
    sin = (angles.sin() * rope.attention_factor).to(dtype).float()
    return cos, sin


def _default(rope: RopeConfig, head_dim: int) -> Tensor:
    """Return frequencies in radians per position: float32 [head_dim / 2]."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    return 1.0 / (rope.theta**exponents)


def _linear(rope: RopeConfig, head_dim: int) -> Tensor:
    return _default(rope, head_dim) / rope.factor


def _llama3(rope: RopeConfig, head_dim: int) -> Tensor:
    """Stretch long waves by the factor, keep short ones, blend those between."""
    frequencies = _default(rope, head_dim)
    wavelengths = 2 * math.pi / frequencies
    longest_kept = rope.original_max_position / rope.high_freq_factor
    shortest_stretched = rope.original_max_position / rope.low_freq_factor
    blend = (rope.original_max_position / wavelengths - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blended = (1 - blend) * frequencies / rope.factor + blend * frequencies
    stretched = torch.where(wavelengths > shortest_stretched, frequencies / rope.factor, blended)
    return torch.where(wavelengths < longest_kept, frequencies, stretched)


def _yarn(rope: RopeConfig, head_dim: int) -> Tensor:
    """Keep dimensions that turn often within the trained length, stretch slow ones, with a ramp between."""

    def dimension_turning(turns: float) -> float:
        return (head_dim * math.log(rope.original_max_position / (turns * 2 * math.pi))) / (
            2 * math.log(rope.theta)
        )

    low, high = dimension_turning(rope.beta_fast), dimension_turning(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # a step instead of a ramp
    stretch = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    frequencies = _default(rope, head_dim)
    kept = 1 - stretch
    return (1.0 / (rope.factor * (1.0 / frequencies))) * (1 - kept) + frequencies * kept


def _longrope(rope: RopeConfig, head_dim: int) -> Tensor:
    factors = torch.tensor(rope.long_factors if rope.is_long else rope.short_factors)
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    return 1.0 / (factors * rope.theta**exponents)


def _attention_factor(kind: str, words: Mapping[str, Any], factor: float, original: int) -> float:
    """Return the attention factor of YaRN and LongRoPE: of the checkpoint, or the papers' defaults."""
    if kind not in ("yarn", "longrope"):
        return 1.0

    if words.get("attention_factor") is not None:
        return float(words["attention_factor"])
    if kind == "longrope":
        return math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    if words.get("mscale") and words.get("mscale_all_dim"):
        return mscale(factor, float(words["mscale"])) / mscale(factor, float(words["mscale_all_dim"]))
    return mscale(factor, 1.0)


def mscale(factor: float, weight: float) -> float:
    """Return YaRN's growth of attention scores with the stretch ``factor``."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


_FREQUENCIES = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
_NEEDED = {"llama3": ("low_freq_factor", "high_freq_factor"), "longrope": ("short_factor", "long_factor")}
