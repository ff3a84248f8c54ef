"""The models of a benchmark, as its record states them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from moonpool.engine.checkpoint.config import ModelConfig
from moonpool.engine.device.selection import choose_device, choose_dtype, page_dtype, weights_dtype
from moonpool.runtime.config.loading import load_config
from moonpool.runtime.config.models_file import served_models
from moonpool.runtime.config.options import Config, EngineOptions
from moonpool.runtime.reports.conditions import ModelFacts


def models_of(sets: Sequence[str]) -> list[ModelFacts]:
    """Those of a local cluster with options as ``key=value``. Raises ``ConfigError``, ``CheckpointError``."""
    return [_of(one.name, one.config) for one in served_models(load_config(None, sets)).models]


def model_at(directory: Path, name: str = "", *, as_stored: bool = False) -> ModelFacts:
    """A checkpoint; ``as_stored``: computed in its own dtype, as on a GPU and by other engines."""
    dtype = ModelConfig.from_checkpoint(directory).stored_dtype if as_stored else "auto"
    return _of(name or directory.name, load_config(None, (f"model.path={directory}", f"model.dtype={dtype}")))


def random_model(name: str, seed: int, weights: str, engine: EngineOptions) -> ModelFacts:
    """Weights that the benchmark draws. ``weights``: their dtype."""
    return ModelFacts(name, f"random weights, seed {seed}", weights, page_dtype(engine, weights))


def _of(name: str, config: Config) -> ModelFacts:
    """``revision``: that of the nodes' records."""
    model = ModelConfig.from_checkpoint(config.model.directory).with_weights(config.engine.weights)
    dtype = choose_dtype(config.model.dtype, model, choose_device(config.model.device))
    return ModelFacts(
        name, model.fingerprint().hex(), weights_dtype(model, dtype), page_dtype(config.engine, dtype)
    )
