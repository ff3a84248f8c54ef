"""float8 (e4m3fn) in Triton: its bytes to numbers and back, on every architecture and in the interpreter.

Pools of float8 are handed to kernels as bytes. Tensor cores multiply what it is widened to, which is exact.
"""

# Triton has no types to check, and its code has compile-time constants in capitals.
# mypy: disable-error-code="import-untyped,untyped-decorator,no-untyped-def"
# ruff: noqa: N803

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moonpool.kernels.reference import FP8

# How a pool's values become numbers: they are numbers already; by the processor's own instruction (from sm_89
# on); bit by bit.
PLAIN, NATIVE, BY_HAND = 0, 1, 2


def fp8_mode(dtype: torch.dtype, arch: int, interpreted: bool = False) -> int:
    """One of the above for a pool of this dtype. arch: the compute capability, such as 90."""
    if dtype != FP8:
        return PLAIN
    return BY_HAND if arch < 89 or interpreted else NATIVE


def as_bytes(pool: Tensor) -> Tensor:
    """The pool as kernels take it."""
    return pool.view(torch.uint8) if pool.dtype == FP8 else pool


@triton.jit
def halves_of(values, MODE: tl.constexpr):
    """Bytes loaded from a pool as float16, which holds every number of e4m3."""
    if MODE == 1:
        numbers = values.to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
    else:
        bits = values.to(tl.int16)
        # float16 counts its exponent from 15 instead of 7: what the bits say is 256 times too small.
        half = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True)
        numbers = tl.where((bits & 0x7F) == 0x7F, float("nan"), half.to(tl.float32) * 256.0).to(tl.float16)
    return numbers


@triton.jit
def widened(values, dtype: tl.constexpr, MODE: tl.constexpr):
    """What was loaded from a pool, in ``dtype``."""
    if MODE != 0:
        values = halves_of(values, MODE).to(dtype)
    return values


@triton.jit
def narrowed(values, factor, dtype: tl.constexpr, MODE: tl.constexpr):
    """float32 ``values`` as a pool of ``dtype`` keeps them; in float8 multiplied by ``factor`` before."""
    if MODE == 0:
        kept = values.to(dtype)
    else:
        values *= factor
        magnitude = tl.abs(values)
        bits = tl.minimum(magnitude, 448.0).to(tl.int32, bitcast=True)
        # To nearest, ties to even; a subnormal's last bit is that of 2^14.
        normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
        small = (magnitude + 16384.0).to(tl.int32, bitcast=True) & 0xFF
        kept = tl.where(magnitude < 0.015625, small, normal)
        kept = tl.where(values != values, 0x7F, kept)
        kept = (kept | ((values.to(tl.int32, bitcast=True) >> 24) & 0x80)).to(tl.uint8)
    return kept
