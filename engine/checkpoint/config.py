"""The model configuration of a checkpoint's config.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moonpool.engine.checkpoint.rope import RopeConfig
from moonpool.engine.errors import CheckpointError, UnsupportedModel
from moonpool.runtime.config.model_directory import read_model_config

# Defaults of transformers for fields that config.json omits, by family.
_FAMILY_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"max_position_embeddings": 2048},
    "mistral": {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": {"max_position_embeddings": 32768, "num_key_value_heads": 32, "sliding_window": 4096},
    "qwen3": {
        "max_position_embeddings": 32768,
        "num_key_value_heads": 32,
        "sliding_window": 4096,
        "head_dim": 128,
    },
    "mixtral": {
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "num_experts_per_tok": 2,
    },
    "qwen2_moe": {
        "max_position_embeddings": 32768,
        "num_key_value_heads": 16,
        "sliding_window": 4096,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
    },
    "qwen3_moe": {
        "max_position_embeddings": 32768,
        "num_key_value_heads": 4,
        "sliding_window": 4096,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
    },
}
_NUM_EXPERTS = {"mixtral": 8, "qwen2_moe": 60, "qwen3_moe": 128}
_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """The mixture-of-experts part of a model."""

    layers: frozenset[int]  # the others are dense
    num_experts: int
    top_k: int
    renormalize: bool  # the chosen experts' probabilities sum to 1
    expert_inter: int  # columns of one expert's MLP
    shared_inter: int  # of the shared expert; 0: none
    block: str  # the mixture's module name in the checkpoint
    projections: tuple[str, str, str]  # names of an expert's gate, up and down matrices


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a Llama-like decoder. Sizes are in elements, windows in tokens."""

    path: Path
    family: str  # model_type, one of _FAMILY_DEFAULTS
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    rms_norm_eps: float
    rope: RopeConfig
    windows: tuple[int, ...]  # per layer; 0: full attention
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    moe: MoeConfig | None  # None: every layer is dense
    tie_word_embeddings: bool
    stored_dtype: str  # float32, bfloat16 or float16
    eos_token_ids: frozenset[int]

    @classmethod
    def from_checkpoint(cls, path: Path | str) -> ModelConfig:
        """Read config.json (fields of transformers 5 and older) and generation_config.json.

        Raises ModelMissing without a config.json, CheckpointError for unreadable or contradictory files,
        UnsupportedModel for features the engine lacks. The latter two name the field.
        """
        path = Path(path)
        raw = read_model_config(path)
        family = raw.get("model_type")
        if family not in _FAMILY_DEFAULTS:
            known = ", ".join(_FAMILY_DEFAULTS)
            raise UnsupportedModel(path, f"model_type {family!r} is not one of {known}")
        words = _ConfigReader(path, {**_FAMILY_DEFAULTS[family], **raw})
        if "quantization_config" in raw:
            raise UnsupportedModel(path, "quantized weights (quantization_config)")
        if (activation := raw.get("hidden_act", "silu")) not in ("silu", "swish"):
            raise UnsupportedModel(path, f"hidden_act {activation!r}: only silu is computed")
        num_heads = words.size("num_attention_heads")
        num_kv_heads = words.size("num_key_value_heads", num_heads)
        hidden_size = words.size("hidden_size")
        head_dim = words.size("head_dim", hidden_size // num_heads)
        if num_heads % num_kv_heads:
            raise CheckpointError(
                path,
                f"num_attention_heads {num_heads} is not a multiple of num_key_value_heads {num_kv_heads}",
            )
        if head_dim % 2:
            raise UnsupportedModel(path, f"head_dim {head_dim}: it must be even for rotary embeddings")
        num_layers = words.size("num_hidden_layers")
        max_position = words.size("max_position_embeddings")
        bias = bool(raw.get("attention_bias", False)) and family in ("llama", "qwen3", "qwen3_moe")
        qkv_bias = family == "qwen2" or (family == "qwen2_moe" and bool(raw.get("qkv_bias", True)))
        return cls(
            path=path,
            family=family,
            vocab_size=words.size("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=words.size("intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            max_position=max_position,
            rms_norm_eps=float(words.raw.get("rms_norm_eps", 1e-6)),
            rope=RopeConfig.from_words(path, words.raw, max_position),
            windows=_windows(path, family, words.raw, num_layers),
            qkv_bias=bias or qkv_bias,
            o_bias=bias,
            mlp_bias=bool(raw.get("mlp_bias", False)) and family == "llama",
            qk_norm=family in ("qwen3", "qwen3_moe"),
            moe=_moe(words, family, num_layers),
            tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
            stored_dtype=_stored_dtype(path, raw),
            eos_token_ids=_eos_token_ids(path, raw),
        )


class _ConfigReader:
    """Checked access to config.json with the family's defaults."""

    def __init__(self, path: Path, raw: Mapping[str, Any]) -> None:
        self.path = path
        self.raw = raw

    def size(self, name: str, default: int | None = None) -> int:
        """Return a positive integer field; null counts as missing."""
        value = self.raw.get(name)
        if value is None:
            if default is None:
                raise CheckpointError(self.path, f"config.json has no {name}")
            value = default
        if not isinstance(value, int) or value <= 0:
            raise CheckpointError(self.path, f"config.json: {name} must be a positive integer, got {value!r}")
        return value


def _read_json(path: Path, name: str) -> dict[str, Any]:
    try:
        value = json.loads((path / name).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(path, f"{name} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(path, f"{name} is not a JSON object")
    return value


def _windows(path: Path, family: str, raw: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """Return each layer's sliding window. Mistral, Mixtral, Qwen3-MoE: all layers. Other Qwen: by
    layer_types, or from max_window_layers on; Qwen2-MoE: every other layer before it."""
    window = int(raw.get("sliding_window") or 0)
    if family == "llama" or (family.startswith("qwen") and not raw.get("use_sliding_window", False)):
        window = 0
    if family in ("mistral", "mixtral", "qwen3_moe") or window == 0:
        return (window,) * num_layers
    kinds = raw.get("layer_types")
    if kinds is None:
        border = int(raw.get("max_window_layers", 28))
        if family == "qwen2_moe":
            return tuple(window if i % 2 == 0 and i < border else 0 for i in range(num_layers))
        return tuple(window if i >= border else 0 for i in range(num_layers))
    if len(kinds) != num_layers or not set(kinds) <= {"full_attention", "sliding_attention"}:
        raise UnsupportedModel(path, f"layer_types {kinds!r} for {num_layers} layers")
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)


def _moe(words: _ConfigReader, family: str, num_layers: int) -> MoeConfig | None:
    """Read the MoE fields. Sparse layers: all of Mixtral; of Qwen every decoder_sparse_step-th one that is
    not in mlp_only_layers."""
    if family not in _NUM_EXPERTS:
        return None
    mixtral, raw = family == "mixtral", words.raw
    # Both names occur in all families.
    num_experts = words.size("num_experts", words.size("num_local_experts", _NUM_EXPERTS[family]))
    if (same := words.size("num_local_experts", num_experts)) != num_experts:
        raise CheckpointError(
            words.path, f"config.json: num_experts {num_experts} and num_local_experts {same} differ"
        )
    if (top_k := words.size("num_experts_per_tok")) > num_experts:
        raise CheckpointError(
            words.path, f"config.json: num_experts_per_tok is {top_k} of only {num_experts} experts"
        )
    dense = [] if mixtral else (raw.get("mlp_only_layers") or [])
    step = 1 if mixtral else words.size("decoder_sparse_step", 1)
    return MoeConfig(
        layers=frozenset(i for i in range(num_layers) if (i + 1) % step == 0 and i not in dense),
        num_experts=num_experts,
        top_k=top_k,
        renormalize=mixtral or bool(raw.get("norm_topk_prob", False)),
        expert_inter=words.size("intermediate_size" if mixtral else "moe_intermediate_size"),
        shared_inter=words.size("shared_expert_intermediate_size") if family == "qwen2_moe" else 0,
        block="block_sparse_moe" if mixtral else "mlp",
        projections=("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj"),
    )


def _stored_dtype(path: Path, raw: Mapping[str, Any]) -> str:
    dtype = raw.get("dtype") or raw.get("torch_dtype") or "float32"
    name = str(dtype).removeprefix("torch.")
    if name not in _DTYPES:
        raise UnsupportedModel(path, f"dtype {name}: only {', '.join(_DTYPES)} are computed")
    return name


def _eos_token_ids(path: Path, raw: Mapping[str, Any]) -> frozenset[int]:
    """Read config.json and generation_config.json: chat models have their end of turn in one of them."""
    values = [raw.get("eos_token_id")]
    if (path / "generation_config.json").exists():
        values.append(_read_json(path, "generation_config.json").get("eos_token_id"))
    ids = [i for value in values for i in (value if isinstance(value, list) else [value])]
    return frozenset(int(i) for i in ids if i is not None)
