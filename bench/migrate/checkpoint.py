"""A checkpoint that accepts longer sequences than it was made for."""

from __future__ import annotations

import json
from pathlib import Path


def with_positions(directory: Path, num_positions: int, scratch: Path) -> Path:
    """``directory``, or a copy in ``scratch`` with links to its files and at least ``num_positions``."""
    words = json.loads((directory / "config.json").read_text())
    if words["max_position_embeddings"] >= num_positions:
        return directory
    for file in directory.iterdir():
        if file.name != "config.json":
            (scratch / file.name).symlink_to(file.resolve())
    (scratch / "config.json").write_text(json.dumps(words | {"max_position_embeddings": num_positions}))
    return scratch
