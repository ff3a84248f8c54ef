"""AWQ: 4-bit codes in 32-bit words along the outputs, which each word holds in the order of ``_ORDER``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moonpool.engine.checkpoint.quantisation import read_words, unpacked
from moonpool.engine.checkpoint.weights import Derived, Shapes
from moonpool.engine.errors import UnsupportedModel
from moonpool.kernels.reference import QuantisedWeight

# Output 8 w + i is at position _ORDER[i] of word w, counted from the low bits.
_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]


@dataclass(frozen=True, slots=True)
class Awq:
    group: int  # 0: all inputs

    name = "awq, 4 bits"

    def weight(self, module: str, shape: tuple[int, int], stored: Shapes) -> Derived | None:
        if f"{module}.qweight" not in stored:
            return None
        outs, ins = shape
        group = self.group or ins
        groups = -(-ins // group)
        sources: dict[str, tuple[int, ...]] = {
            f"{module}.qweight": (ins, outs // 8),
            f"{module}.scales": (groups, outs),
        }
        if f"{module}.qzeros" in stored:
            sources[f"{module}.qzeros"] = (groups, outs // 8)
        return Derived(sources, partial(_make, group=group))


def _make(qweight: Tensor, scales: Tensor, qzeros: Tensor | None = None, *, group: int) -> QuantisedWeight:
    zeros = None if qzeros is None else _columns(qzeros).to(torch.int16)
    return QuantisedWeight("int4", _columns(qweight), scales.T.float().contiguous(), group, zeros=zeros)


def _columns(words: Tensor) -> Tensor:
    """int32 [rows, outs / 8] → uint8 [outs, rows]."""
    codes = unpacked(words, 4).view(len(words), -1, 8)[:, :, _ORDER]
    return codes.flatten(1).T.contiguous()


def read(path: Path, words: Mapping[str, Any]) -> Awq:
    read_words(path, words, "bits", "group_size")
    if words["bits"] != 4:
        raise UnsupportedModel(path, f"quantization_config: awq with bits {words['bits']!r}: only 4 are read")
    version = str(words.get("version") or "gemm").lower()
    if version != "gemm":
        raise UnsupportedModel(path, f"quantization_config: awq version {version!r} is not gemm")
    return Awq(max(0, int(words["group_size"])))
