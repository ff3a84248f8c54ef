"""Batches that attention is tested with, and what its results are compared with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moonpool.kernels.reference import FP8
from tests.kernels.paged import PagedBatch, Shape, assert_near
from tests.kernels.triton_device import INTERPRETED

DECODES = Shape(((1, 1), (1, 16), (1, 17), (1, 150)))
CHUNKS = Shape(((1, 1), (17, 17), (5, 20), (0, 7), (40, 130)))
VARIANTS: list[dict[str, Any]] = [
    {},
    {"window": 20},
    {"soft_cap": 2.0, "dtype": torch.float16},
    {"head_dim": 40, "num_heads": 7, "num_kv_heads": 1},
    {"head_dim": 128, "dtype": torch.float16, "block_size": 64},
    {"block_size": 8, "num_heads": 2, "num_kv_heads": 2, "window": 3},
    {"kv_dtype": FP8, "k_scale": 0.05, "v_scale": 0.02, "dtype": torch.float16},
    {"kv_dtype": FP8, "k_scale": 0.05, "v_scale": 0.02, "head_dim": 40, "block_size": 128, "window": 20},
]
if not INTERPRETED:
    VARIANTS += [{"dtype": torch.bfloat16, "head_dim": dim} for dim in (64, 128, 256)]
    VARIANTS += [
        {"dtype": torch.bfloat16, "head_dim": dim, "kv_dtype": FP8, "k_scale": 0.05, "v_scale": 0.02}
        for dim in (64, 128, 256)
    ]


def assert_states(batch: PagedBatch, out: Tensor, lse: Tensor) -> None:
    expected, expected_lse = batch.expected_states()
    # Weights of float8 values are rounded to float16 before they are summed, whatever q is.
    narrow = torch.float16 if batch.shape.kv_dtype == FP8 and batch.shape.dtype == torch.float32 else None
    assert_near(out, expected, narrow or batch.shape.dtype, factor=2)
    assert_near(lse, expected_lse, torch.float32, factor=8)
