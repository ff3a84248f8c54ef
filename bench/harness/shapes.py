"""The models of a benchmark: as its record states them, and checkpoints of the shapes that people run."""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from moonpool.engine.checkpoint.config import ModelConfig
from moonpool.engine.device.selection import choose_device, choose_dtype, page_dtype, weights_dtype
from moonpool.engine.sharding.tensor_slices import expected_tensors
from moonpool.runtime.config.loading import load_config
from moonpool.runtime.config.models_file import served_models
from moonpool.runtime.config.options import Config, EngineOptions, ModelOptions
from moonpool.runtime.machine.compiled_library import cache_folder
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


_QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "torch_dtype": "bfloat16",
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 32000,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "attention_bias": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
SHAPES = {
    "qwen3-0.6b": {**_QWEN3, "hidden_size": 1024, "intermediate_size": 3072},
    "qwen3-1.7b": {**_QWEN3, "hidden_size": 2048, "intermediate_size": 6144},
    "qwen3-8b": {
        **_QWEN3,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "vocab_size": 151936,
        "tie_word_embeddings": False,
    },
}
_SEED = 0


def shape_directory(name: str) -> Path:
    """The checkpoint of ``SHAPES[name]`` in bfloat16 with a tokenizer, in the format that every engine reads.
    It is made below the user's cache directory if it is absent."""
    words = SHAPES[name]
    digest = hashlib.sha256(json.dumps([words, _SEED]).encode()).hexdigest()[:8]
    target = cache_folder() / "shapes" / f"{name}-{digest}"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=target.parent))
        try:
            write_checkpoint(scratch, words)
            if not target.exists():  # else another process was faster
                scratch.rename(target)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return target


def write_checkpoint(directory: Path, words: dict[str, Any]) -> None:
    """Random weights of the standard deviation 0.02, and the shipped tokenizer with words added."""
    (directory / "config.json").write_text(json.dumps(words))
    shipped = ModelOptions().directory
    # A CPU takes minutes for the billions of numbers of a large shape.
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(_SEED)
    tensors = {}
    for name, shape in expected_tensors(ModelConfig.from_checkpoint(directory)).items():
        weight = torch.empty(tuple(shape), dtype=torch.bfloat16, device=device)
        weight = weight.fill_(1) if "norm" in name else weight.normal_(0, 0.02, generator=generator)
        tensors[name] = weight.cpu()
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    tokenizer = json.loads((shipped / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    known = {*vocabulary.values(), *(token["id"] for token in tokenizer["added_tokens"])}
    vocabulary |= {f"Ġword{i}": i for i in range(words["vocab_size"]) if i not in known}
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    shutil.copy(shipped / "tokenizer_config.json", directory)
    eos = {"bos_token_id": words["bos_token_id"], "eos_token_id": words["eos_token_id"]}
    (directory / "generation_config.json").write_text(json.dumps(eos))


def write_first_layers(directory: Path, target: Path, num_layers: int) -> None:
    """Write a checkpoint of the first layers of another, with its embeddings and tokenizer."""
    words = json.loads((directory / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(words | {"num_hidden_layers": num_layers}))
    left_out = {f"model.layers.{i}." for i in range(num_layers, words["num_hidden_layers"])}
    with safe_open(directory / "model.safetensors", "pt") as file:
        names = [name for name in file.keys() if not any(name.startswith(part) for part in left_out)]  # noqa: SIM118
        save_file(
            {name: file.get_tensor(name) for name in names}, target / "model.safetensors", {"format": "pt"}
        )
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(directory / name, target)
