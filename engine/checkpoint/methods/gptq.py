"""GPTQ: 4- or 8-bit codes in 32-bit words along the inputs, groups of inputs in any order (``g_idx``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moonpool.engine.checkpoint.quantisation import ordered, read_words, unpacked, wanted_bits
from moonpool.engine.checkpoint.weights import Derived, Shapes
from moonpool.engine.errors import UnsupportedModel
from moonpool.kernels.reference import QuantisedWeight


@dataclass(frozen=True, slots=True)
class Gptq:
    path: Path
    bits: int
    group: int  # 0: all inputs
    offset: int  # of the stored zeros: the first files lack 1

    @property
    def name(self) -> str:
        return f"gptq, {self.bits} bits"

    def weight(self, module: str, shape: tuple[int, int], stored: Shapes) -> Derived | None:
        if f"{module}.qweight" not in stored:
            return None
        (outs, ins), words = shape, 32 // self.bits
        group = self.group or ins
        groups = -(-ins // group)
        sources: dict[str, tuple[int, ...]] = {
            f"{module}.qweight": (ins // words, outs),
            f"{module}.qzeros": (groups, outs // words),
            f"{module}.scales": (groups, outs),
        }
        if f"{module}.g_idx" in stored:
            sources[f"{module}.g_idx"] = (ins,)
        return Derived(sources, partial(self._make, module=module, group=group))

    def _make(
        self,
        qweight: Tensor,
        qzeros: Tensor,
        scales: Tensor,
        g_idx: Tensor | None = None,
        *,
        module: str,
        group: int,
    ) -> QuantisedWeight:
        return ordered(
            QuantisedWeight(
                "int4" if self.bits == 4 else "int8",
                unpacked(qweight.T, self.bits),
                scales.T.float().contiguous(),
                group,
                zeros=unpacked(qzeros, self.bits).T.to(torch.int16).contiguous() + self.offset,
            ),
            g_idx,
            self.path,
            module,
        )


def read(path: Path, words: Mapping[str, Any]) -> Gptq:
    read_words(path, words, "bits", "group_size")
    kind = words.get("checkpoint_format") or "gptq"
    if kind not in ("gptq", "gptq_v2"):
        raise UnsupportedModel(
            path, f"quantization_config: checkpoint_format {kind!r} is not gptq or gptq_v2"
        )
    group = max(0, int(words["group_size"]))
    return Gptq(path, wanted_bits(path, words["bits"]), group, offset=int(kind == "gptq"))
