"""Checkpoints of real shapes: what is written can be loaded, and the same is written every time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from moonpool.bench.harness import shapes
from moonpool.bench.harness.floor import Floor
from moonpool.engine.checkpoint.config import ModelConfig
from moonpool.engine.device.device import CpuDevice
from moonpool.engine.device.selection import choose_dtype

TINY = {
    **shapes.SHAPES["qwen3-0.6b"],
    "num_hidden_layers": 1,
    "hidden_size": 8,
    "intermediate_size": 16,
    "head_dim": 4,
    "vocab_size": 3000,
}


def test_a_checkpoint_is_made_once_with_a_tokenizer_of_its_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setitem(shapes.SHAPES, "tiny", TINY)
    directory = shapes.shape_directory("tiny")
    made_ns = (directory / "model.safetensors").stat().st_mtime_ns
    assert shapes.shape_directory("tiny") == directory
    assert (directory / "model.safetensors").stat().st_mtime_ns == made_ns
    assert [path.name for path in directory.parent.iterdir()] == [directory.name]

    shapes.write_checkpoint(tmp_path, TINY)
    ours, again = (load_file(path / "model.safetensors") for path in (directory, tmp_path))
    assert ours.keys() == again.keys()
    assert all(torch.equal(ours[name], again[name]) for name in ours)
    assert ModelConfig.from_checkpoint(directory).vocab_size == 3000
    words = json.loads((directory / "tokenizer.json").read_text())
    ids = {*words["model"]["vocab"].values(), *(token["id"] for token in words["added_tokens"])}
    assert ids == set(range(3000))


def test_only_small_models_are_widened_on_a_cpu(tmp_path: Path) -> None:
    def dtype(**words: object) -> str:
        (tmp_path / "config.json").write_text(json.dumps({**shapes.SHAPES["qwen3-0.6b"], **words}))
        return choose_dtype("auto", ModelConfig.from_checkpoint(tmp_path), CpuDevice())

    assert dtype() == "bfloat16"
    assert dtype(torch_dtype="float32") == "float32"
    assert dtype(num_hidden_layers=2) == "float32"


def test_the_floor_counts_every_weight_once(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(shapes.SHAPES["qwen3-0.6b"]))
    floor = Floor(ModelConfig.from_checkpoint(tmp_path), nbytes_per_s=1e9, flops_per_s=1e12)
    assert floor.decode_s(1, 0) == pytest.approx(2 * 473.2e6 / 1e9, rel=1e-3)
    assert floor.prefill_s(2048) == pytest.approx(2.29, rel=1e-2)
