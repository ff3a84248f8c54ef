"""What the conductor must know of the model: its limits, and what its KV blocks look like."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moonpool.kvstore.blocks.layout import DTYPE_NBYTES, KVLayout
from moonpool.runtime.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The one model a cluster serves, as its checkpoint's config.json describes it. No weights are read."""

    name: str  # in the API
    max_model_len: int  # most tokens of prompt and output together
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int  # tokens a KV block

    @classmethod
    def from_checkpoint(
        cls, path: Path, *, block_size: int, name: str = "", max_model_len: int = 0
    ) -> ServedModel:
        """Read ``config.json`` (and ``generation_config.json`` for the end-of-sequence ids) below ``path``.

        Raises:
            ConfigError: the file is missing, is not JSON or lacks a field; ``max_model_len`` is beyond it.
        """
        config = _read_json(path / "config.json")
        generation_path = path / "generation_config.json"
        generation = _read_json(generation_path) if generation_path.exists() else {}
        try:
            num_heads = int(config["num_attention_heads"])
            longest = int(config["max_position_embeddings"])
            if max_model_len > longest:
                raise ConfigError(
                    f"model.max_model_len is {max_model_len}, but {path.name} was made for {longest} tokens",
                    "model.max_model_len",
                )
            return cls(
                name=name or path.name,
                max_model_len=max_model_len or longest,
                vocab_size=int(config["vocab_size"]),
                # Chat models often name the token that ends a turn in only one of the two.
                eos_token_ids=tuple(dict.fromkeys(_token_ids(config) + _token_ids(generation))),
                num_layers=int(config["num_hidden_layers"]),
                num_kv_heads=int(config.get("num_key_value_heads") or num_heads),
                head_dim=int(config.get("head_dim") or int(config["hidden_size"]) // num_heads),
                block_size=block_size,
            )
        except KeyError as error:
            raise ConfigError(f"{path / 'config.json'} has no {error.args[0]}", "model.path") from error

    def layouts(self) -> dict[str, KVLayout]:
        """Every layout a node may have for this model, by fingerprint in hex: nodes choose the dtype."""
        layouts = (
            KVLayout(self.num_layers, self.num_kv_heads, self.block_size, self.head_dim, dtype)
            for dtype in DTYPE_NBYTES
        )
        return {layout.fingerprint.hex(): layout for layout in layouts}


def _token_ids(config: dict[str, Any]) -> tuple[int, ...]:
    value = config.get("eos_token_id")
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (int(value),)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise ConfigError(
            f"{path} does not exist: model.path must be a checkpoint directory", "model.path"
        ) from error
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}", "model.path") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} is not a JSON object", "model.path")
    return value
