"""K and V as a pool keeps them."""

from __future__ import annotations

import torch
from torch import Tensor

from moonpool.kernels.reference.precision import wide

FP8 = torch.float8_e4m3fn
# The largest number e4m3 has; what is larger is stored as it.
FP8_MAX = 448.0


def to_pool_dtype(x: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """``x`` in the pool's dtype; for float8, divided by ``scale`` first. NaN stays NaN."""
    if dtype != FP8:
        return x.to(dtype)
    return (wide(x) * (1.0 / scale)).clamp(-FP8_MAX, FP8_MAX).to(dtype)
