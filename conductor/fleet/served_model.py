"""The served model: its limits and the layout of its KV blocks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moonpool.conductor.text.checkpoint_json import read_json
from moonpool.kvstore.blocks.layout import DTYPE_NBYTES, KVLayout
from moonpool.runtime.config.model_directory import read_model_config, stretched_positions
from moonpool.runtime.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model of a cluster, described by the config.json of its checkpoint. No weights are read."""

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
        config, generation = read_model_config(path), read_json(path / "generation_config.json")
        try:
            num_heads = int(config["num_attention_heads"])
            longest = max(int(config["max_position_embeddings"]), stretched_positions(config))
            if max_model_len > longest:
                raise ConfigError(
                    f"model.max_model_len is {max_model_len}, but {path.name} supports {longest} tokens",
                    "model.max_model_len",
                )
            return cls(
                name=name or path.name,
                max_model_len=max_model_len or longest,
                vocab_size=int(config["vocab_size"]),
                # Chat models often name the end-of-turn token in only one of the two files.
                eos_token_ids=tuple(dict.fromkeys(_token_ids(config) + _token_ids(generation))),
                num_layers=int(config["num_hidden_layers"]),
                num_kv_heads=int(config.get("num_key_value_heads") or num_heads),
                head_dim=int(config.get("head_dim") or int(config["hidden_size"]) // num_heads),
                block_size=block_size,
            )
        except KeyError as error:
            raise ConfigError(f"{path / 'config.json'} has no {error.args[0]}", "model.path") from error

    def layouts(self) -> dict[str, KVLayout]:
        """All layouts that nodes may have for this model, by fingerprint in hex: nodes choose the dtype."""
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
