"""FP8: float8_e4m3fn with a scale for the matrix, or for each block (DeepSeek-V3: 128 × 128)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moonpool.engine.checkpoint.quantisation import float8
from moonpool.engine.checkpoint.weights import Derived, Shapes
from moonpool.engine.errors import UnsupportedModel


@dataclass(frozen=True, slots=True)
class Fp8:
    block: tuple[int, int] | None  # outputs and inputs with one scale; None: all

    name = "fp8"

    def weight(self, module: str, shape: tuple[int, int], stored: Shapes) -> Derived | None:
        # Both names occur with both shapes; either is multiplied.
        for scale in (f"{module}.weight_scale_inv", f"{module}.weight_scale"):
            if scale in stored:
                return float8(module, shape, scale, stored[scale], self.block)
        return None


def read(path: Path, words: Mapping[str, Any]) -> Fp8:
    kind = words.get("fmt") or "e4m3"
    if kind not in ("e4m3", "float8_e4m3fn"):
        raise UnsupportedModel(path, f"quantization_config: fp8 with fmt {kind!r} is not e4m3")
    block = words.get("weight_block_size")
    if block is not None and (len(block) != 2 or not all(isinstance(n, int) and n > 0 for n in block)):
        raise UnsupportedModel(path, f"quantization_config: weight_block_size {block!r} is not two sizes")
    return Fp8(None if block is None else (block[0], block[1]))
