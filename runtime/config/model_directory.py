"""The directory that ``model.path`` names, and its config.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moonpool.runtime.errors import ConfigError


class ModelMissing(ConfigError):
    """``model.path`` is not a checkpoint directory. Nothing has been started."""

    def __init__(self, directory: Path, reason: str) -> None:
        super().__init__(
            f"{directory} {reason}: set model.path (--model) to a Hugging Face checkpoint directory "
            "(config.json, tokenizer.json, *.safetensors)",
            "model.path",
        )
        self.directory = directory


def read_model_config(directory: Path) -> dict[str, Any]:
    """Return the content of config.json. Raises ModelMissing."""
    if not directory.is_dir():
        raise ModelMissing(directory, "is not a directory")
    try:
        value = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelMissing(directory, "has no config.json") from None
    except (OSError, ValueError) as error:
        raise ModelMissing(directory, f"has a config.json that cannot be read ({error})") from error
    if not isinstance(value, dict):
        raise ModelMissing(directory, "has a config.json that is not a JSON object")
    return value


def stretched_positions(config: Mapping[str, Any]) -> int:
    """Return up to which position YaRN stretches the model of a config.json; 0: it does not, or not by words
    of its own.

    Qwen's recipe for long contexts adds these words and leaves ``max_position_embeddings``.
    """
    words = config.get("rope_scaling") or config.get("rope_parameters") or {}
    original = words.get("original_max_position_embeddings") or config.get("original_max_position_embeddings")
    is_yarn = (words.get("rope_type") or words.get("type")) == "yarn"
    return int(float(words["factor"]) * int(original)) if is_yarn and original and words.get("factor") else 0
