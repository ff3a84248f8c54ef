"""Adapters that cannot be served are refused with a sentence that names the file."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from moonpool.engine.adapters.peft import SETTINGS_FILE, WEIGHTS_FILE, PeftAdapter
from moonpool.engine.checkpoint.config import ModelConfig
from moonpool.engine.errors import AdapterRefused
from tests.engine.adapters import make_adapter
from tests.engine.conftest import Reference


@pytest.fixture
def adapter(checkpoint: Reference, tmp_path: Path) -> Path:
    return make_adapter(checkpoint, tmp_path / "adapter", r=4).path


@pytest.fixture
def config(checkpoint: Reference) -> ModelConfig:
    return ModelConfig.from_checkpoint(checkpoint.path)


def settings(path: Path, **changes: Any) -> None:
    file = path / SETTINGS_FILE
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def weights(path: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(path / WEIGHTS_FILE)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / WEIGHTS_FILE)


FIRST = "base_model.model.model.layers.0.self_attn.q_proj"


def widened(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{FIRST}.lora_A.weight"] = torch.zeros(4, 64)


def of_rank(rank: int) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        a, b = f"{FIRST}.lora_A.weight", f"{FIRST}.lora_B.weight"
        tensors[a], tensors[b] = torch.zeros(rank, tensors[a].shape[1]), torch.zeros(len(tensors[b]), rank)

    return change


def renamed(tensors: dict[str, torch.Tensor]) -> None:
    tensors["base_model.model.model.layers.9.self_attn.q_proj.lora_A.weight"] = tensors.pop(
        f"{FIRST}.lora_A.weight"
    )


def infinite(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{FIRST}.lora_A.weight"][1, 2] = torch.inf


def embedding(tensors: dict[str, torch.Tensor]) -> None:
    tensors["base_model.model.model.embed_tokens.lora_embedding_A"] = torch.zeros(4, 160)


@pytest.mark.parametrize(
    ("file", "break_it", "why"),
    [
        (SETTINGS_FILE, lambda path: (path / SETTINGS_FILE).unlink(), "cannot be read"),
        (SETTINGS_FILE, lambda path: (path / SETTINGS_FILE).write_text("{"), "not JSON"),
        (SETTINGS_FILE, lambda path: settings(path, peft_type="LOHA"), "only LORA"),
        (SETTINGS_FILE, lambda path: settings(path, use_dora=True), "use_dora is True"),
        (SETTINGS_FILE, lambda path: settings(path, modules_to_save=["lm_head"]), "modules_to_save"),
        (SETTINGS_FILE, lambda path: settings(path, bias="all"), "bias is all"),
        (SETTINGS_FILE, lambda path: settings(path, init_lora_weights="pissa_niter_4"), "changes the base"),
        (SETTINGS_FILE, lambda path: settings(path, lora_alpha="x"), "lora_alpha must be a number"),
        (WEIGHTS_FILE, lambda path: settings(path, r=8), "has rank 4; adapter_config.json says 8"),
        (WEIGHTS_FILE, lambda path: (path / WEIGHTS_FILE).unlink(), "cannot be read"),
        (
            WEIGHTS_FILE,
            lambda path: (path / WEIGHTS_FILE).rename(path / "adapter_model.bin"),
            "adapter_model.bin is not read",
        ),
        (WEIGHTS_FILE, lambda path: (path / WEIGHTS_FILE).write_bytes(b"\0" * 99), "corrupt"),
        (
            WEIGHTS_FILE,
            lambda path: (path / WEIGHTS_FILE).write_bytes((path / WEIGHTS_FILE).read_bytes()[:-10]),
            "corrupt",
        ),
        (WEIGHTS_FILE, lambda path: weights(path, dict.clear), "no tensors"),
        (WEIGHTS_FILE, lambda path: weights(path, widened), "another base model"),
        (WEIGHTS_FILE, lambda path: weights(path, renamed), "is no projection of"),
        (WEIGHTS_FILE, lambda path: weights(path, of_rank(257)), "rank 257; served are 1 to 256"),
        (WEIGHTS_FILE, lambda path: weights(path, infinite), "finite"),
        (WEIGHTS_FILE, lambda path: weights(path, embedding), "embeddings"),
        (
            WEIGHTS_FILE,
            lambda path: weights(path, lambda tensors: tensors.pop(f"{FIRST}.lora_B.weight")),
            "lacks lora_B",
        ),
    ],
)
def test_what_cannot_be_served(
    adapter: Path, config: ModelConfig, file: str, break_it: Callable[[Path], object], why: str
) -> None:
    PeftAdapter(adapter, config)
    break_it(adapter)
    with pytest.raises(AdapterRefused, match=why) as refused:
        PeftAdapter(adapter, config)
    assert refused.value.path == adapter / file
    assert str(adapter / file) in str(refused.value)


def test_a_file_larger_than_any_adapter_is_not_read(adapter: Path, config: ModelConfig) -> None:
    with (adapter / WEIGHTS_FILE).open("r+b") as file:
        file.truncate(1 << 30)
    with pytest.raises(AdapterRefused, match=r"1,073,741,824 bytes"):
        PeftAdapter(adapter, config)


def test_an_adapter_of_another_model(
    adapter: Path, make_checkpoint: Callable[..., Reference], config: ModelConfig
) -> None:
    wider = ModelConfig.from_checkpoint(make_checkpoint("llama", hidden_size=54).path)
    with pytest.raises(AdapterRefused, match="another base model"):
        PeftAdapter(adapter, wider)
    latent = ModelConfig.from_checkpoint(make_checkpoint("deepseek_v3").path)
    with pytest.raises(AdapterRefused, match="take no adapters"):
        PeftAdapter(adapter, latent)


def test_the_digest_is_of_the_content(adapter: Path, config: ModelConfig, tmp_path: Path) -> None:
    copied = tmp_path / "copy"
    shutil.copytree(adapter, copied)
    first = PeftAdapter(adapter, config)
    assert PeftAdapter(copied, config).digest == first.digest
    settings(copied, lora_alpha=99)
    assert PeftAdapter(copied, config).digest != first.digest
    with pytest.raises(AdapterRefused, match="has changed"):
        PeftAdapter.read(copied, first.digest, config)


@pytest.mark.parametrize("voice", ["prophet", "cynic"])
def test_the_shipped_voices(voice: str) -> None:
    home = Path(__file__).parents[2] / "moonpool" / "demo"
    adapter = PeftAdapter(home / "adapters" / voice, ModelConfig.from_checkpoint(home / "model"))
    assert adapter.rank == 8
    assert sum(file.stat().st_size for file in adapter.path.iterdir()) <= 1 << 20
