"""Setup of the draft model: the choices that precede its loading, and the check that it fits its model."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from moonpool.engine.setup import EngineSetup
from moonpool.runtime.config.engine_options import ModelOptions, ParallelOptions, SpeculativeOptions
from moonpool.runtime.errors import ConfigError

_OPTION = "engine.speculative.draft_path"


def choose_draft(setup: EngineSetup, chosen: ModelOptions) -> EngineSetup:
    """Return the setup of the draft model for an engine of ``setup``: on its device, with plain KV in a pool
    of its own. ``chosen``: the engine's.

    Raises ConfigError for a directory without a checkpoint or with another tokenizer, CheckpointError or
    UnsupportedModel.
    """
    speculative = setup.options.speculative
    path = speculative.draft_directory
    if not (path / "config.json").is_file():
        raise ConfigError(f"{_OPTION}: {path} is no checkpoint directory: it has no config.json", _OPTION)
    options = replace(
        setup.options,
        kv_dtype="auto",
        weights="auto",
        pool_nbytes=speculative.pool_nbytes,
        parallel=ParallelOptions(),
        speculative=SpeculativeOptions(),
    )
    draft = EngineSetup.choose(path, options, chosen, setup.device)
    _check(draft.config.vocab_size == setup.config.vocab_size, path, setup.config.path, "vocab_size")
    ours, theirs = _token_ids(setup.config.path), _token_ids(path)
    # Without a tokenizer of its own a model is served by token ids only.
    _check(not ours or ours == theirs, path, setup.config.path, "tokenizer")
    return draft


def _check(equal: bool, draft: Path, model: Path, what: str) -> None:
    if not equal:
        raise ConfigError(
            f"{_OPTION}: the draft model in {draft} has another {what} than the model in {model}: "
            "set it to a checkpoint of the same tokens",
            _OPTION,
        )


def _token_ids(path: Path) -> dict[str, Any]:
    """Return what tokenizer.json says of the ids of tokens; empty without the file."""
    file = path / "tokenizer.json"
    if not file.is_file():
        return {}
    content = json.loads(file.read_text(encoding="utf-8"))
    added = {token["content"]: token["id"] for token in content.get("added_tokens") or ()}
    return {"vocab": content["model"]["vocab"], "added": added}
