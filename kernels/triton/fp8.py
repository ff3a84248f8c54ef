"""float8 (e4m3fn) in Triton: conversion from and to bytes, on every architecture and in the interpreter.

Kernels get pools of float8 as bytes. Tensor cores multiply the values converted to float16, which is exact.
"""

# Triton is untyped, and its compile-time constants are capitals.
# mypy: disable-error-code="import-untyped,untyped-decorator,no-untyped-def"
# ruff: noqa: N803

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moonpool.kernels.reference import FP8

# Conversions of pool values: none needed; by an instruction of the GPU (from sm_89 on); by bit operations.
PLAIN, NATIVE, BITWISE = 0, 1, 2


def fp8_mode(dtype: torch.dtype, arch: int, interpreted: bool = False) -> int:
    """The conversion for a pool of this dtype. arch: the compute capability, such as 90."""
    if dtype != FP8:
        return PLAIN
    return BITWISE if arch < 89 or interpreted else NATIVE


def as_bytes(pool: Tensor) -> Tensor:
    """The pool as kernels get it: float8 as bytes."""
    return pool.view(torch.uint8) if pool.dtype == FP8 else pool


@triton.jit
def halves_of(values, MODE: tl.constexpr):
    """Bytes from a pool as float16, which represents every number of e4m3."""
    if MODE == 1:
        numbers = values.to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
    else:
        bits = values.to(tl.int16)
        # The exponent bias of float16 is 15 instead of 7, so the shifted bits mean a number 256 times
        # smaller.
        half = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True)
        numbers = tl.where((bits & 0x7F) == 0x7F, float("nan"), half.to(tl.float32) * 256.0).to(tl.float16)
    return numbers


@triton.jit
def widened(values, dtype: tl.constexpr, MODE: tl.constexpr):
    """Values loaded from a pool, converted to ``dtype``."""
    if MODE != 0:
        values = halves_of(values, MODE).to(dtype)
    return values


@triton.jit
def narrowed(values, factor, dtype: tl.constexpr, MODE: tl.constexpr):
    """float32 ``values`` converted to the ``dtype`` of a pool; multiplied by ``factor`` first for float8."""
    if MODE == 0:
        stored = values.to(dtype)
    else:
        values *= factor
        magnitude = tl.abs(values)
        bits = tl.minimum(magnitude, 448.0).to(tl.int32, bitcast=True)
        # To nearest, ties to even; adding 2^14 aligns the last bit of subnormals.
        normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
        small = (magnitude + 16384.0).to(tl.int32, bitcast=True) & 0xFF
        stored = tl.where(magnitude < 0.015625, small, normal)
        stored = tl.where(values != values, 0x7F, stored)
        stored = (stored | ((values.to(tl.int32, bitcast=True) >> 24) & 0x80)).to(tl.uint8)
    return stored
