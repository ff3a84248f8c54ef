"""Writes checkpoints in few bits as other tools write them, and the plain model that each of them means.

Independent of the engine: integers are packed one by one, and a matrix is computed from its definition.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from shutil import copytree
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from tests.engine.conftest import Reference
from tests.lazily import Lazily

transformers = Lazily("transformers")

Array = np.ndarray[Any, Any]
#: Of a module: its stored tensors without the module's name, and the matrix they mean.
Stored = tuple[dict[str, torch.Tensor], Array]


def _groups(ins: int, group: int) -> Array:
    return np.arange(ins) // group


def _pack(codes: Array, bits: int, axis: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Unsigned codes into int32 words along ``axis``; code i of a word is at bit ``order[i] × bits``."""
    count = 32 // bits
    moved = np.moveaxis(codes.astype(np.int64), axis, -1)
    moved = np.pad(moved, [(0, 0), (0, -moved.shape[-1] % count)])
    words = np.zeros((moved.shape[0], moved.shape[1] // count), np.int64)
    for i in range(moved.shape[1]):
        place = (order or range(count))[i % count]
        words[:, i // count] += moved[:, i] << (bits * place)
    return torch.from_numpy(np.moveaxis(words.astype(np.uint32).view(np.int32), -1, axis).copy())


def _rounded(
    weight: Array, bits: int, groups: Array, symmetric: bool, scale_dtype: torch.dtype
) -> tuple[Array, Array, Array]:
    """Codes [out, in] from 0 on, scales and zeros [out, groups]."""
    outs, most = weight.shape[0], 2**bits - 1
    scales, zeros = np.zeros((outs, groups.max() + 1)), np.zeros((outs, groups.max() + 1), np.int64)
    for g in range(groups.max() + 1):
        of_group = weight[:, groups == g]
        if symmetric:
            scales[:, g] = np.abs(of_group).max(1) / (2 ** (bits - 1) - 1)
            zeros[:, g] = 2 ** (bits - 1)
        else:
            low, high = np.minimum(of_group.min(1), 0), np.maximum(of_group.max(1), 0)
            scales[:, g] = (high - low) / most
            zeros[:, g] = np.clip(np.round(-low / scales[:, g]), 1, most)
    scales = torch.from_numpy(scales).to(scale_dtype).double().numpy()
    codes = np.clip(np.round(weight / scales[:, groups]) + zeros[:, groups], 0, most).astype(np.int64)
    return codes, scales, zeros


def _meant(codes: Array, scales: Array, zeros: Array, groups: Array) -> Array:
    return (codes - zeros[:, groups]) * scales[:, groups]


def gptq(
    weight: Array, *, bits: int = 4, group: int = 16, v2: bool = False, act_order: bool = False
) -> Stored:
    ins = weight.shape[1]
    groups = _groups(ins, group)
    if act_order:
        groups = np.random.default_rng(ins).permutation(groups)
    codes, scales, zeros = _rounded(weight, bits, groups, bits == 8, torch.float16)
    stored = {
        "qweight": _pack(codes.T, bits, 0),
        "qzeros": _pack(zeros.T if v2 else zeros.T - 1, bits, 1),
        "scales": torch.from_numpy(scales.T.copy()).half(),
        "g_idx": torch.from_numpy(groups.astype(np.int32)),
    }
    return stored, _meant(codes, scales, zeros, groups)


def awq(weight: Array, *, group: int = 16) -> Stored:
    groups = _groups(weight.shape[1], group)
    codes, scales, zeros = _rounded(weight, 4, groups, False, torch.float16)
    order = (0, 4, 1, 5, 2, 6, 3, 7)
    stored = {
        "qweight": _pack(codes.T, 4, 1, order),
        "qzeros": _pack(zeros.T, 4, 1, order),
        "scales": torch.from_numpy(scales.T.copy()).half(),
    }
    return stored, _meant(codes, scales, zeros, groups)


def packed(
    weight: Array, *, bits: int = 4, group: int = 0, symmetric: bool = True, act_order: bool = False
) -> Stored:
    """compressed-tensors, pack-quantized."""
    outs, ins = weight.shape
    groups = _groups(ins, group or ins)
    if act_order:
        groups = np.random.default_rng(ins).permutation(groups)
    codes, scales, zeros = _rounded(weight, bits, groups, symmetric, torch.bfloat16)
    stored = {
        "weight_packed": _pack(codes, bits, 1),
        "weight_scale": torch.from_numpy(scales).bfloat16(),
        "weight_shape": torch.tensor([outs, ins]),
    }
    if not symmetric:
        stored["weight_zero_point"] = _pack(zeros, bits, 0)
    if act_order:
        stored["weight_g_idx"] = torch.from_numpy(groups.astype(np.int32))
    return stored, _meant(codes, scales, zeros, groups)


def int8(weight: Array) -> Stored:
    """compressed-tensors, int-quantized: a signed byte a weight."""
    groups = _groups(weight.shape[1], weight.shape[1])
    codes, scales, zeros = _rounded(weight, 8, groups, True, torch.float32)
    stored = {
        "weight": torch.from_numpy(codes - 128).to(torch.int8),
        "weight_scale": torch.from_numpy(scales).float(),
    }
    return stored, _meant(codes, scales, zeros, groups)


def fp8(weight: Array, *, block: int = 0, channel: bool = False, name: str = "weight_scale") -> Stored:
    outs, ins = weight.shape
    rows, columns = (1 if channel else outs), ins
    if block:
        rows = columns = block
    scales = np.zeros((-(-outs // rows), -(-ins // columns)))
    for i, j in np.ndindex(scales.shape):
        scales[i, j] = np.abs(weight[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]).max() / 448
    scales = scales.astype(np.float32).astype(np.float64)
    every = scales[np.arange(outs) // rows][:, np.arange(ins) // columns]
    codes = torch.from_numpy(weight / every).to(torch.float8_e4m3fn)
    stored = {"weight": codes, name: torch.from_numpy(scales).float()}
    if not block and not channel:
        stored[name] = stored[name].reshape(())
        stored["input_scale"] = torch.tensor(1.0)
    return stored, codes.double().numpy() * every


def group_of(bits: int, kind: str = "int", **words: Any) -> dict[str, Any]:
    return {
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": {"num_bits": bits, "type": kind, **words}}
        }
    }


_CT: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "ignore": ["lm_head"],
    "quantization_status": "compressed",
}
#: quantization_config and how a matrix is stored.
FORMATS: dict[str, tuple[dict[str, Any], Callable[[Array], Stored]]] = {
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": False, "sym": True}, gptq),
    "gptq-act-order": (
        {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": True},
        lambda weight: gptq(weight, act_order=True),
    ),
    "gptq-8-bits": (
        {"quant_method": "gptq", "bits": 8, "group_size": -1, "desc_act": False},
        lambda weight: gptq(weight, bits=8, group=weight.shape[1]),
    ),
    "gptq-v2": (
        {"quant_method": "gptq", "bits": 4, "group_size": 16, "checkpoint_format": "gptq_v2"},
        lambda weight: gptq(weight, v2=True),
    ),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 16, "zero_point": True, "version": "gemm"}, awq),
    "packed-int4": (
        {**_CT, "format": "pack-quantized", **group_of(4, group_size=16, strategy="group", symmetric=True)},
        lambda weight: packed(weight, group=16),
    ),
    "packed-int4-asymmetric": (
        {**_CT, "format": "pack-quantized", **group_of(4, group_size=16, symmetric=False, actorder="group")},
        lambda weight: packed(weight, group=16, symmetric=False, act_order=True),
    ),
    "packed-int8": (
        {**_CT, "format": "pack-quantized", **group_of(8, strategy="channel", symmetric=True)},
        lambda weight: packed(weight, bits=8),
    ),
    "int8": ({**_CT, "format": "int-quantized", **group_of(8, strategy="channel", symmetric=True)}, int8),
    "float8-channel": (
        {**_CT, "format": "float-quantized", **group_of(8, "float", strategy="channel")},
        lambda weight: fp8(weight, channel=True),
    ),
    "fp8": ({"quant_method": "fp8", "activation_scheme": "static"}, fp8),
    "fp8-blocks": (
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 32], "fmt": "e4m3"},
        lambda weight: fp8(weight, block=32, name="weight_scale_inv"),
    ),
}


def write(
    format_name: str, plain: Reference, path: Path, skip: tuple[str, ...] = ("gate", "router")
) -> Reference:
    """``plain`` with the matrices of its layers in this format, at ``path``, and the model that this means.

    skip: endings of modules that stay plain.
    """
    words, store = FORMATS[format_name]
    copytree(plain.path, path, dirs_exist_ok=True)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "quantization_config": words}))
    tensors = load_file(path / "model.safetensors")
    meant = dict(tensors)
    for name in meant:
        module = name.removesuffix(".weight")
        if module == name or ".layers." not in name or meant[name].dim() != 2 or module.endswith(skip):
            continue
        stored, matrix = store(tensors.pop(name).double().numpy())
        tensors |= {f"{module}.{kind}": tensor.contiguous() for kind, tensor in stored.items()}
        meant[name] = torch.from_numpy(matrix).float()
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return Reference(path, plain_model(plain.path, meant, path / "meant"))


def plain_model(of: Path, tensors: dict[str, torch.Tensor], path: Path) -> Any:
    """transformers' model with the configuration of the checkpoint ``of`` and other tensors, in float32."""
    copytree(of, path)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    model = transformers.AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
    return model.float().eval()
