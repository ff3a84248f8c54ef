"""What the families of models share in reading a config.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from moonpool.engine.checkpoint.config import ModelConfig, MoeConfig
from moonpool.engine.checkpoint.quantisation import method_of
from moonpool.engine.checkpoint.rope import RopeConfig
from moonpool.engine.errors import CheckpointError, UnsupportedModel
from moonpool.runtime.config.model_directory import stretched_positions

_DTYPES = ("float32", "bfloat16", "float16")
_ACTIVATIONS: dict[str, Literal["silu", "gelu_tanh"]] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
}


class ConfigWords:
    """Checked access to the fields of config.json, with the defaults of transformers for its family."""

    def __init__(self, path: Path, raw: Mapping[str, Any], **defaults: Any) -> None:
        self.path = path
        self.raw = {**defaults, **raw}

    def decoder(
        self, activation: str = "hidden_act", *, partial_rotary: bool = False, quantized: str = ""
    ) -> ModelConfig:
        """Return the model as Llama's layers would compute it: without biases, windows and experts.

        ``activation``: the field that names it. ``partial_rotary``: partial_rotary_factor has a meaning.
        ``quantized``: the quant_method that the family reads itself, if any.

        Raises CheckpointError or UnsupportedModel, which name the field.
        """
        path, raw = self.path, self.raw
        words = raw.get("quantization_config")
        weights = None if words is None or self.is_quantized(quantized) else method_of(path, words)
        if (gate := raw.get(activation, "silu")) not in _ACTIVATIONS:
            known = ", ".join(_ACTIVATIONS)
            raise UnsupportedModel(path, f"{activation} {gate!r}: only {known} are computed")
        num_heads = self.size("num_attention_heads")
        num_kv_heads = self.size("num_key_value_heads", num_heads)
        hidden_size = self.size("hidden_size")
        head_dim = self.size("head_dim", hidden_size // num_heads)
        if num_heads % num_kv_heads:
            raise CheckpointError(
                path,
                f"num_attention_heads {num_heads} is not a multiple of num_key_value_heads {num_kv_heads}",
            )
        if head_dim % 2:
            raise UnsupportedModel(path, f"head_dim {head_dim}: it must be even for rotary embeddings")
        num_layers = self.size("num_hidden_layers")
        max_position = self.size("max_position_embeddings")
        return ModelConfig(
            path=path,
            family=str(raw["model_type"]),
            vocab_size=self.size("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=self.size("intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            max_position=max(max_position, stretched_positions(raw)),
            rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
            ropes=(RopeConfig.from_words(path, raw, max_position, partial=partial_rotary),) * num_layers,
            windows=(0,) * num_layers,
            tie_word_embeddings=self.flag("tie_word_embeddings"),
            stored_dtype=self._stored_dtype(),
            eos_token_ids=self._eos_token_ids(),
            activation=_ACTIVATIONS[gate],
            weights=weights,
        )

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

    def flag(self, name: str, default: bool = False) -> bool:
        return bool(self.raw.get(name, default))

    def is_quantized(self, method: str) -> bool:
        """Return whether quantization_config names ``method``."""
        found = self.raw.get("quantization_config")
        return isinstance(found, dict) and found.get("quant_method") == method

    @property
    def window(self) -> int:
        """The sliding window of the layers that have one; 0: none has."""
        return int(self.raw.get("sliding_window") or 0)

    def windows(self, by_default: Mapping[int, bool] | None = None) -> tuple[int, ...]:
        """Return each layer's window by ``layer_types``, or by ``by_default`` (layer → slides; None: all)."""
        num_layers, window = self.size("num_hidden_layers"), self.window
        kinds = self.raw.get("layer_types")
        if kinds is None or by_default is None:
            return tuple(window if by_default is None or by_default[i] else 0 for i in range(num_layers))
        if len(kinds) != num_layers or not set(kinds) <= {"full_attention", "sliding_attention"}:
            raise UnsupportedModel(self.path, f"layer_types {kinds!r} for {num_layers} layers")
        return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)

    def mixture(
        self,
        num_experts: int,
        *,
        inter: str = "moe_intermediate_size",
        shared_inter: int = 0,
        renormalize: bool | None = None,
        bias: bool = False,
        block: str = "mlp",
        projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    ) -> MoeConfig:
        """Read the mixture; ``num_experts``: where the file names none; ``inter``: the field of its columns.

        Sparse layers: every decoder_sparse_step-th one that is not in mlp_only_layers.
        Raises CheckpointError.
        """
        # Both names occur in all families.
        num_experts = self.size("num_experts", self.size("num_local_experts", num_experts))
        if (same := self.size("num_local_experts", num_experts)) != num_experts:
            raise CheckpointError(
                self.path, f"config.json: num_experts {num_experts} and num_local_experts {same} differ"
            )
        if (top_k := self.size("num_experts_per_tok")) > num_experts:
            raise CheckpointError(
                self.path, f"config.json: num_experts_per_tok is {top_k} of only {num_experts} experts"
            )
        dense, step = self.raw.get("mlp_only_layers") or [], self.size("decoder_sparse_step", 1)
        return MoeConfig(
            layers=frozenset(
                i for i in range(self.size("num_hidden_layers")) if (i + 1) % step == 0 and i not in dense
            ),
            num_experts=num_experts,
            top_k=top_k,
            renormalize=self.flag("norm_topk_prob") if renormalize is None else renormalize,
            expert_inter=self.size(inter),
            shared_inter=shared_inter,
            block=block,
            projections=projections,
            bias=bias,
        )

    def _stored_dtype(self) -> str:
        dtype = self.raw.get("dtype") or self.raw.get("torch_dtype") or "float32"
        name = str(dtype).removeprefix("torch.")
        if name not in _DTYPES:
            raise UnsupportedModel(self.path, f"dtype {name}: only {', '.join(_DTYPES)} are computed")
        return name

    def _eos_token_ids(self) -> frozenset[int]:
        """Read config.json and generation_config.json: chat models have their end of turn in one of them."""
        values = [self.raw.get("eos_token_id")]
        if (self.path / "generation_config.json").exists():
            values.append(_read_json(self.path, "generation_config.json").get("eos_token_id"))
        ids = [i for value in values for i in (value if isinstance(value, list) else [value])]
        return frozenset(int(i) for i in ids if i is not None)


def _read_json(path: Path, name: str) -> dict[str, Any]:
    try:
        value = json.loads((path / name).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(path, f"{name} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(path, f"{name} is not a JSON object")
    return value
