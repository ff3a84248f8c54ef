"""Checkpoints of real shapes: what is written can be loaded, and the same is written every time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from moonpool.bench.harness import shapes
from moonpool.bench.harness.floor import Floor, best_s, instruction_limit, measure_device
from moonpool.engine.checkpoint.config import ModelConfig
from moonpool.engine.device.device import CpuDevice
from moonpool.engine.device.selection import choose_dtype
from moonpool.kernels.cpu.library import load

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


@pytest.mark.slow  # a product in bfloat16 takes 150 ms where the processor has no instructions for it
def test_products_are_limited_by_the_faster_of_two_formats() -> None:
    x = torch.randn(1024, 1024)
    flops_per_s = 2 * 1024**3 / best_s(lambda: F.linear(x, x), 5)
    _, limit = measure_device(torch.device("cpu"), torch.get_num_threads())
    assert limit > flops_per_s / 3


@pytest.mark.skipif(load() is None, reason="no compiler here")
def test_multiply_adds_on_registers_are_made_and_counted() -> None:
    library = load()
    assert library is not None
    multiply, values = library.gil_released["multiply_registers"][None], torch.ones(2)
    assert multiply(values.data_ptr(), 7) == 7 * multiply(torch.ones(2).data_ptr(), 1)
    # Each of 12 (on short vectors 8) sums begins at 1, and 1 × 1 is added to it 7 times.
    assert float(values[0]) in (1 + 12 * 8, 1 + 8 * 8)
    assert (instruction_limit(1) or 0) > 1e8
