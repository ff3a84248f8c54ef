"""Checkpoints that can be served, and clear words about those that cannot."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from moonpool.conductor.fleet.served_model import ServedModel
from moonpool.engine.checkpoint.config import ModelConfig
from moonpool.engine.checkpoint.fingerprint import fingerprint
from moonpool.engine.checkpoint.weights import Checkpoint
from moonpool.engine.device.device import DeviceMemory
from moonpool.engine.engine import Engine
from moonpool.engine.errors import CheckpointError, PoolTooSmall, UnsupportedModel
from moonpool.engine.setup import EngineSetup
from moonpool.engine.sharding.tensor_slices import expected_tensors
from moonpool.runtime.config.model_directory import ModelMissing
from moonpool.runtime.config.options import EngineOptions, ModelOptions
from moonpool.runtime.errors import ConfigError
from moonpool.runtime.machine import file_hashes
from tests.lazily import Lazily

transformers = Lazily("transformers")


@pytest.fixture
def copy(make_checkpoint, tmp_path) -> Callable[..., Path]:
    """A checkpoint of one's own, with words of its config.json changed (None: left out)."""

    def make(family: str = "llama", **words: Any) -> Path:
        path = tmp_path / f"copy-{len(list(tmp_path.iterdir()))}"
        shutil.copytree(make_checkpoint(family).path, path)
        config = json.loads((path / "config.json").read_text()) | words
        config = {name: value for name, value in config.items() if value is not None}
        (path / "config.json").write_text(json.dumps(config))
        return path

    return make


def edit_tensors(path: Path, edit: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(path / "model.safetensors")
    edit(tensors)
    save_file(tensors, path / "model.safetensors")


def check(path: Path) -> None:
    Checkpoint(path).check(expected_tensors(ModelConfig.from_checkpoint(path)))


@pytest.mark.parametrize("tied", [False, True])
async def test_sharded_checkpoints_load_with_progress(make_checkpoint, serve, tied) -> None:
    sharded = make_checkpoint("llama", shard_size="30KB", tie_word_embeddings=tied)
    assert len(list(sharded.path.glob("*.safetensors"))) > 3
    reports: list[tuple[int, int, str]] = []
    engine = Engine(sharded.path, EngineOptions(pool_nbytes=1 << 20), ModelOptions(device="cpu"))
    await engine.start(lambda *report: reports.append(report))
    await engine.close()
    names = {name for _, _, name in reports}
    assert names == set(expected_tensors(engine.config))
    done = [d for d, _, _ in reports]
    assert done == sorted(done)
    assert done[-1] == reports[-1][1], "the last report is the whole of it"
    async with serve(sharded.path) as driver:
        (result,) = await driver.run(driver.sequence([1, 2, 3], max_tokens=8))
    assert result.token_ids == sharded.greedy([1, 2, 3], 8)


def test_old_and_new_spellings_mean_the_same(copy) -> None:
    new = copy(rope_parameters={"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.0}, dtype="bfloat16")
    old = copy(
        rope_parameters=None,
        dtype=None,
        rope_theta=5000.0,
        rope_scaling={"type": "linear", "factor": 2.0},
        torch_dtype="bfloat16",
    )
    a, b = ModelConfig.from_checkpoint(new), ModelConfig.from_checkpoint(old)
    assert (a.ropes, a.stored_dtype) == (b.ropes, b.stored_dtype)
    rope = a.ropes[0]
    assert (rope.kind, rope.theta, rope.factor, a.stored_dtype) == ("linear", 5000.0, 2.0, "bfloat16")


def test_yarn_stretches_what_the_checkpoint_can_hold(copy) -> None:
    """As in the README of Qwen3: max_position_embeddings stays as it was."""
    words = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    old = copy("qwen3", max_position_embeddings=80, rope_parameters=None, rope_theta=1e4, rope_scaling=words)
    assert ModelConfig.from_checkpoint(old).max_position == 256
    done = copy("qwen3", max_position_embeddings=300, rope_parameters={**words, "rope_theta": 1e4})
    assert ModelConfig.from_checkpoint(done).max_position == 300
    for path, longest in ((old, 256), (done, 300)):
        assert ServedModel.from_checkpoint(path, block_size=16).max_model_len == longest
    assert ServedModel.from_checkpoint(old, block_size=16, max_model_len=200).max_model_len == 200


def test_words_left_out_mean_what_transformers_means(copy) -> None:
    config = ModelConfig.from_checkpoint(copy(head_dim=None, num_key_value_heads=None, rope_parameters=None))
    assert (config.head_dim, config.num_kv_heads, config.ropes[0].theta) == (8, 6, 10000.0)
    assert set(ModelConfig.from_checkpoint(copy("mistral", sliding_window=None)).windows) == {4096}


@pytest.mark.parametrize("family", ["qwen2", "qwen2_moe", "qwen3_moe"])
def test_layers_that_are_not_named_have_the_windows_transformers_gives_them(copy, family) -> None:
    words = {"use_sliding_window": True, "sliding_window": 12, "max_window_layers": 2}
    path = copy(family, layer_types=None, **words)
    kinds = getattr(transformers.AutoConfig.from_pretrained(path), "layer_types", ["sliding_attention"] * 3)
    expected = tuple(12 if kind == "sliding_attention" else 0 for kind in kinds)
    assert ModelConfig.from_checkpoint(path).windows == expected


def test_experts_are_counted_under_either_name(copy) -> None:
    """transformers 5 writes num_local_experts for Qwen3-MoE, those before it num_experts."""
    words = {"num_experts": None, "num_local_experts": None}
    for name in words:
        assert ModelConfig.from_checkpoint(copy("qwen3_moe", **words | {name: 9})).moe.num_experts == 9
    assert ModelConfig.from_checkpoint(copy("qwen3_moe", **words)).moe.num_experts == 128
    config = ModelConfig.from_checkpoint(copy("mixtral", **words, rms_norm_eps=None, rope_parameters=None))
    assert (config.moe.num_experts, config.rms_norm_eps, config.ropes[0].theta) == (8, 1e-5, 1e6)


def test_end_of_sequence_tokens_come_from_both_configs(copy) -> None:
    path = copy(eos_token_id=5)
    (path / "generation_config.json").unlink(missing_ok=True)
    assert ModelConfig.from_checkpoint(path).eos_token_ids == {5}
    (path / "generation_config.json").write_text('{"eos_token_id": [6, 7]}')
    assert ModelConfig.from_checkpoint(path).eos_token_ids == {5, 6, 7}


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2' is not one of .*llama, .*qwen2_moe, qwen3"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope type 'dynamic'"),
        ({"rope_parameters": {"rope_type": "proportional"}}, "rope type 'proportional'"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"dtype": "float8_e4m3fn"}, "dtype float8_e4m3fn"),
        (
            {"quantization_config": {"bits": 4}},
            "quant_method None is not one of awq, compressed-tensors, fp8, gptq",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_is_not_computed_is_refused_by_name(copy, words, sentence) -> None:
    with pytest.raises(UnsupportedModel, match=sentence):
        ModelConfig.from_checkpoint(copy(**words))


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ({"hidden_size": None}, "config.json has no hidden_size"),
        ({"num_hidden_layers": -1}, "num_hidden_layers must be a positive integer"),
        ({"model_type": "mixtral", "num_experts_per_tok": 9}, "num_experts_per_tok is 9 of only 8 experts"),
        (
            {"model_type": "qwen3_moe", "num_experts": 4, "num_local_experts": 8},
            "num_experts 4 and num_local_experts 8 differ",
        ),
        ({"num_key_value_heads": 4}, "num_attention_heads 6 is not a multiple of num_key_value_heads 4"),
        (
            {"rope_parameters": {"rope_type": "llama3", "factor": 8.0}},
            "needs low_freq_factor, high_freq_factor",
        ),
        ({"rope_parameters": {"rope_type": "longrope"}}, "needs short_factor, long_factor"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_config_that_contradicts_itself_names_the_word(copy, words, sentence) -> None:
    with pytest.raises(CheckpointError, match=sentence):
        ModelConfig.from_checkpoint(copy(**words))


def test_a_missing_tensor_is_named(copy) -> None:
    path = copy()
    edit_tensors(path, lambda t: t.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(CheckpointError, match=r"tensor model\.layers\.1\.mlp\.up_proj\.weight is missing"):
        check(path)


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("mixtral", "block_sparse_moe.experts.3.w2.weight"),
        ("qwen2_moe", "mlp.shared_expert_gate.weight"),
        ("qwen3_moe", "mlp.experts.3.up_proj.weight"),
    ],
)
def test_a_missing_or_wrong_tensor_of_a_mixture_is_named(copy, family, name) -> None:
    path, name = copy(family), f"model.layers.2.{name}"
    edit_tensors(path, lambda t: t.update({name: t[name][:, :7].clone()}))
    with pytest.raises(CheckpointError, match=rf"tensor {name} .* has shape \[\d+, 7\], config.json implies"):
        check(path)
    edit_tensors(path, lambda t: t.pop(name))
    with pytest.raises(CheckpointError, match=f"tensor {name} is missing"):
        check(path)


def test_a_tensor_of_another_shape_is_named(copy) -> None:
    path = copy()
    edit_tensors(path, lambda t: t.update({"model.norm.weight": torch.ones(7)}))
    with pytest.raises(CheckpointError, match=r"tensor model\.norm\.weight .* shape \[7\], .* \[48\]"):
        check(path)


def test_a_tensor_in_a_dtype_not_computed_is_named(copy) -> None:
    path = copy()
    edit_tensors(path, lambda t: t.update({"model.norm.weight": torch.ones(48, dtype=torch.int8)}))
    with pytest.raises(UnsupportedModel, match=r"tensor model\.norm\.weight is stored as I8"):
        check(path)


def test_a_truncated_file_names_the_first_tensor_cut_off(copy) -> None:
    path = copy()
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"tensor \S+ is cut off: model.safetensors ends at byte"):
        check(path)


@pytest.mark.parametrize("content", [b"", b"\xff" * 64, b"\x10\0\0\0\0\0\0\0{}"])
def test_a_file_that_is_no_safetensors_is_named(copy, content) -> None:
    path = copy()
    (path / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model.safetensors is not a readable safetensors file"):
        check(path)


def test_missing_files_are_named(copy, tmp_path) -> None:
    path = copy()
    (path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"has no model.safetensors"):
        check(path)
    (path / "config.json").unlink()
    with pytest.raises(ModelMissing, match=r"has no config.json"):
        ModelConfig.from_checkpoint(path)
    with pytest.raises(ModelMissing, match="is not a directory"):
        ModelConfig.from_checkpoint(tmp_path / "nowhere")


async def test_a_checkpoint_that_fails_to_load_leaves_an_engine_that_closes(copy) -> None:
    path = copy()
    edit_tensors(path, lambda t: t.pop("lm_head.weight"))
    engine = Engine(path, EngineOptions(pool_nbytes=1 << 20), ModelOptions(device="cpu"))
    with pytest.raises(CheckpointError, match="lm_head"):
        await engine.start()
    await engine.close()


def test_the_fingerprint_names_the_weights(copy) -> None:
    path, same = copy(), copy()
    assert fingerprint(path) == fingerprint(same)
    edit_tensors(same, lambda t: t.update({"model.norm.weight": t["model.norm.weight"] + 1}))
    assert fingerprint(path) != fingerprint(same)


@pytest.fixture
def hashed(monkeypatch, tmp_path) -> list[str]:
    """The names of the files whose bytes are read, in order."""
    names: list[str] = []
    read = file_hashes._hash
    monkeypatch.setattr(file_hashes, "_hash", lambda file: names.append(file.name) or read(file))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return names


@pytest.mark.parametrize("read_only", [False, True])
def test_any_byte_changes_the_fingerprint_and_bytes_are_read_once(
    tmp_path, hashed, monkeypatch, read_only
) -> None:
    path = tmp_path / "model"
    shutil.copytree(ModelOptions().directory, path)
    (path / ".moonpool-fingerprint").unlink(missing_ok=True)
    monkeypatch.setattr(file_hashes, "_SETTLED_NS", 3600 * 10**9)  # longer than this test takes
    file = path / "model.safetensors"
    if read_only:  # also for root
        (path / ".moonpool-fingerprint").mkdir()
    os.utime(file, ns=(1, 1))
    before = fingerprint(path)
    assert fingerprint(path) == before
    assert hashed == ["model.safetensors"]
    # Among the bytes of a large file, few pages of which would be a sample.
    with file.open("r+b") as data:
        data.seek(file.stat().st_size * 37 // 100)
        byte = data.read(1)
        data.seek(-1, os.SEEK_CUR)
        data.write(bytes([byte[0] ^ 1]))
    assert fingerprint(path) != before
    # Just changed, and so perhaps not for the last time: not kept.
    assert fingerprint(path) != before
    assert hashed == ["model.safetensors"] * 3


def test_damaged_hashes_are_made_again(copy, hashed) -> None:
    path = copy()
    os.utime(path / "model.safetensors", ns=(1, 1))
    expected = fingerprint(path)
    for damage in ("", "[1]", '{"model.safetensors:1:1:1": "00"}'):
        (path / ".moonpool-fingerprint").write_text(damage)
        assert fingerprint(path) == expected
    assert len(hashed) == 4


def test_latents_are_served_on_a_gpu(make_checkpoint, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    memory = DeviceMemory(80 << 30, 80 << 30, 0)
    device = SimpleNamespace(torch=torch.device("cuda"), memory=lambda: memory)
    path = make_checkpoint("deepseek_v3").path
    setup = EngineSetup.choose(path, EngineOptions(), ModelOptions(), device)  # type: ignore[arg-type]
    assert setup.whole_layout.shape[1:3] == (1, 1)  # a latent is key and value


def test_impossible_options_are_refused(make_checkpoint) -> None:
    path = make_checkpoint("llama").path
    with pytest.raises(PoolTooSmall, match=r"raise engine\.pool_nbytes"):
        Engine(path, EngineOptions(pool_nbytes=1000), ModelOptions(device="cpu"))
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="no CUDA device"):
            Engine(path, EngineOptions(), ModelOptions(device="cuda"))
