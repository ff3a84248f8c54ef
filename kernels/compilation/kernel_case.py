"""A kernel and the shapes that it is compiled for without a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from moonpool.kernels.reference import FP8

POINTERS = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16", FP8: "*u8"}
STRIDES = dict.fromkeys(("layer_offset", "block_stride", "kv_stride", "head_stride"), "i32")
RULES = {"scale": "fp32", "v_scale": "fp32", "window": "i32", "soft_cap": "fp32"}


@dataclass(frozen=True)
class Case:
    """A kernel, the shapes that it is compiled for, and its required properties."""

    name: str
    kernel: Any
    pointers: dict[str, str]
    scalars: dict[str, str]
    constants: dict[str, Any]
    num_warps: int = 4
    num_stages: int = 2
    multiplies_tiles: bool = False
    multiplies_warpgroups: bool = False
    loads_nbytes: int = 0  # at least, by the widest load
    resident: int = 1  # at least, on a multiprocessor
    divisible: tuple[str, ...] = ()  # scalars that are multiples of 16
