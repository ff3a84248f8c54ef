"""JSON files of a checkpoint. Imports no tokenizer, so that the base installation can read them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from moonpool.runtime.errors import ConfigError


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object of a checkpoint; {} if the file does not exist.

    Raises:
        ConfigError: it is not a JSON object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}", "model.path") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} is not a JSON object", "model.path")
    return value
