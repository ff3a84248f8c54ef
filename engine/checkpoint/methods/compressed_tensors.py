"""compressed-tensors: packed 4- and 8-bit integers, 8-bit integers and float8, as llm-compressor writes them.

Weights with quantised activations are computed with exact activations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moonpool.engine.checkpoint.quantisation import float8, ordered, read_words, unpacked, wanted_bits
from moonpool.engine.checkpoint.weights import Derived, Shapes
from moonpool.engine.errors import CheckpointError, UnsupportedModel
from moonpool.kernels.reference import QuantisedWeight

_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision")


@dataclass(frozen=True, slots=True)
class CompressedTensors:
    """A module's tensors tell which of the schemes it has: several may occur in one checkpoint."""

    path: Path
    format: str
    block: tuple[int, int] | None  # of float8

    @property
    def name(self) -> str:
        return f"compressed-tensors, {self.format}"

    def weight(self, module: str, shape: tuple[int, int], stored: Shapes) -> Derived | None:
        scale = f"{module}.weight_scale"
        if scale not in stored:
            return None
        if f"{module}.weight_packed" in stored:
            return self._packed(module, shape, stored)
        if stored.dtype(f"{module}.weight") == "I8":
            return self._bytes(module, shape, stored)
        return float8(module, shape, scale, stored[scale], self.block)

    def _packed(self, module: str, shape: tuple[int, int], stored: Shapes) -> Derived:
        outs, ins = shape
        packed = stored[f"{module}.weight_packed"]
        bits = next((bits for bits in (4, 8) if packed == (outs, -(-ins * bits // 32))), 0)
        groups = (stored[f"{module}.weight_scale"] + (1,))[1]
        if not bits or ins % groups:
            raise CheckpointError(
                self.path,
                f"{module}: weight_packed {list(packed)} with {groups} groups does not hold {outs} × {ins} "
                "weights of 4 or 8 bits",
            )
        sources: dict[str, tuple[int, ...]] = {
            f"{module}.weight_packed": packed,
            f"{module}.weight_scale": (outs, groups),
        }
        optional = {"weight_zero_point": (-(-outs * bits // 32), groups), "weight_g_idx": (ins,)}
        found = [name for name in optional if f"{module}.{name}" in stored]
        sources |= {f"{module}.{name}": optional[name] for name in found}
        return Derived(sources, partial(self._make, module=module, shape=shape, bits=bits, found=found))

    def _make(
        self,
        packed: Tensor,
        scale: Tensor,
        *others: Tensor,
        module: str,
        shape: tuple[int, int],
        bits: int,
        found: list[str],
    ) -> QuantisedWeight:
        outs, ins = shape
        more = dict(zip(found, others, strict=True))
        zeros = more.get("weight_zero_point")
        if zeros is not None:
            zeros = unpacked(zeros.T, bits)[:, :outs].T.to(torch.int16).contiguous()
        weight = QuantisedWeight(
            "int4" if bits == 4 else "int8",
            unpacked(packed, bits)[:, :ins].contiguous(),
            scale.float(),
            ins // scale.shape[1],
            zeros=zeros,
        )
        return ordered(weight, more.get("weight_g_idx"), self.path, module)

    def _bytes(self, module: str, shape: tuple[int, int], stored: Shapes) -> Derived:
        scale = stored[f"{module}.weight_scale"]
        outs, ins = shape
        sources: dict[str, tuple[int, ...]] = {f"{module}.weight": shape, f"{module}.weight_scale": scale}
        if f"{module}.weight_zero_point" in stored:
            sources[f"{module}.weight_zero_point"] = scale
        groups = scale[1] if len(scale) == 2 else 1
        if ins % groups or (len(scale) == 2 and scale[0] != outs):
            raise CheckpointError(
                self.path, f"{module}: weight_scale {list(scale)} for {outs} × {ins} weights"
            )

        def make(codes: Tensor, scale: Tensor, zeros: Tensor | None = None) -> QuantisedWeight:
            whole = zeros if zeros is None else zeros.to(torch.int16).view(-1, groups).expand(outs, -1) + 128
            return QuantisedWeight(
                "int8",
                codes.view(torch.uint8) ^ 128,
                scale.float().view(-1, groups).expand(outs, -1).contiguous(),
                ins // groups,
                zeros=whole,
            )

        return Derived(sources, make)


def read(path: Path, words: Mapping[str, Any]) -> CompressedTensors:
    read_words(path, words, "format", "config_groups")
    if words["format"] not in _FORMATS:
        raise UnsupportedModel(
            path, f"compressed-tensors format {words['format']!r} is not one of {', '.join(_FORMATS)}"
        )
    sparsity = (words.get("sparsity_config") or {}).get("format", "dense")
    if sparsity != "dense":
        raise UnsupportedModel(path, f"compressed-tensors sparsity {sparsity!r}: only dense is read")
    for name, group in ((words.get("transform_config") or {}).get("config_groups") or {}).items():
        # Those of weights alone are in what is stored.
        if any(not str(one.get("location")).startswith("weight_") for one in group.get("apply") or ()):
            raise UnsupportedModel(
                path, f"compressed-tensors transform {name}: activations are not rotated in steps"
            )
    block = None
    for name, group in words["config_groups"].items():
        weights = group.get("weights")
        if not weights:
            raise UnsupportedModel(path, f"compressed-tensors {name}: it quantises no weights")
        kind, bits = weights.get("type", "int"), weights.get("num_bits")
        if kind == "float" and bits != 8:
            raise UnsupportedModel(path, f"compressed-tensors {name}: floats of {bits} bits: only 8 are read")
        if kind == "int":
            wanted_bits(path, bits)
        if weights.get("block_structure"):
            outs, ins = weights["block_structure"]
            block = outs, ins
    return CompressedTensors(path, words["format"], block)
