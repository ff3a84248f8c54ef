"""The dtypes of arithmetic and of the KV pool."""

from __future__ import annotations

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
# The largest number of e4m3. Larger ones are stored as this one.
FP8_MAX = 448.0


def to_compute_dtype(x: Tensor) -> Tensor:
    """``x`` in the dtype of arithmetic: float64 stays, everything else becomes float32."""
    return x if x.dtype == torch.float64 else x.float()


def to_pool_dtype(x: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """``x`` in the dtype of the pool; for float8, divided by ``scale`` first. NaN stays NaN."""
    if dtype != FP8:
        return x.to(dtype)
    return (to_compute_dtype(x) * (1.0 / scale)).clamp(-FP8_MAX, FP8_MAX).to(dtype)
