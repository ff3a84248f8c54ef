"""The dtypes of arithmetic and of the KV pool."""

from __future__ import annotations

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
# The largest number of e4m3. Larger ones are stored as this one.
FP8_MAX = 448.0


# Bytes that a pool of int8 has for a token and head beside its codes: a float32 scale.
SCALE_NBYTES = 4
_TINY = 1e-30  # 127 / this is finite


def head_dim_of(pool: Tensor) -> int:
    """``head_dim`` of K and V in a pool of six dimensions."""
    return pool.shape[5] - (SCALE_NBYTES if pool.dtype == torch.int8 else 0)


def codes_and_scales(pool: Tensor) -> tuple[Tensor, Tensor]:
    """Views of an int8 pool: codes [..., block_size, head_dim], float32 scales [..., block_size].

    The last two dimensions of the pool are block_size and head_dim + 4, contiguous: their bytes are the codes
    of all tokens, then their scales.
    """
    block_size, head_dim = pool.shape[4], head_dim_of(pool)
    flat, end = pool.flatten(-2), block_size * head_dim
    return flat[..., :end].view(*pool.shape[:5], head_dim), flat[..., end:].view(torch.float32)


def to_codes(x: Tensor) -> tuple[Tensor, Tensor]:
    """int8 codes [..., n], and float32 scales [...]: the largest |x| / 127; NaN if any is NaN or infinite.

    Each code is x / scale, rounded to nearest: no value is off by more than half a scale (a row below 1e-30
    is zeros). Where x / scale is between two codes, forms may differ.
    """
    x = to_compute_dtype(x)
    largest = x.abs().amax(-1)
    scales = largest / 127 + (x * 0).sum(-1)
    factors = torch.where(largest > _TINY, 127 / largest, 0.0)
    return (x * factors[..., None]).round().nan_to_num().clamp(-127, 127).to(torch.int8), scales.float()


def to_compute_dtype(x: Tensor) -> Tensor:
    """``x`` in the dtype of arithmetic: float64 stays, everything else becomes float32."""
    return x if x.dtype == torch.float64 else x.float()


def to_pool_dtype(x: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """``x`` in the dtype of the pool; for float8, divided by ``scale`` first. NaN stays NaN."""
    if dtype != FP8:
        return x.to(dtype)
    return (to_compute_dtype(x) * (1.0 / scale)).clamp(-FP8_MAX, FP8_MAX).to(dtype)
