"""Triton form of products with weights in few bits, and float8 through torch's scaled product."""

# Triton is untyped, and its compile-time constants are capitals.
# mypy: disable-error-code="import-untyped,untyped-decorator,no-untyped-def"
# ruff: noqa: N803

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

import torch
import triton
import triton.language as tl
from torch import Tensor

from moonpool.kernels.reference import FP8
from moonpool.kernels.reference.quantised import MIDDLE, Kind
from moonpool.kernels.reference.quantised import quantised_matmul as plain_matmul
from moonpool.kernels.triton.fp8 import fp8_mode, halves_of
from moonpool.kernels.triton.launch import architecture

_MOST_INPUTS = 128  # of a tile
_LEAST_INPUTS = 32  # two tiles of 4-bit codes, at least what tensor cores multiply
_FP8_MAX = 448.0


@dataclass(frozen=True, slots=True)
class QuantisedChoice:
    """Tile of a product: rows, outputs and inputs, all in one group."""

    rows: int
    outs: int
    ins: int
    num_warps: int
    num_stages: int

    @classmethod
    def of(cls, rows: int, group: int, dtype: torch.dtype) -> QuantisedChoice:
        """With few rows, reading the codes dominates: many programs, each of few outputs, and of as few warps
        that a thread loads 16 bytes."""
        most = _MOST_INPUTS if rows <= 16 else _MOST_INPUTS // 2
        ins = gcd(group, most) if dtype.itemsize == 2 else _LEAST_INPUTS
        return cls(16, 32, ins, ins // 32, 4) if rows <= 16 else cls(64, 64, ins, 4, 3)


@triton.jit
def centred(codes, zero, dtype: tl.constexpr, MODE: tl.constexpr):
    """Codes [inputs, outs] less their zeros [outs], exact in 16 bits. MODE: of float8; 0: integers."""
    if MODE != 0:
        values = halves_of(codes, MODE).to(dtype)
    else:
        values = (codes.to(tl.int16) - zero[None, :]).to(tl.float32).to(dtype)
    return values


@triton.jit(do_not_specialize=["n"])
def quantised_tile(
    x, codes, scales, zeros, out, n, outs, ins, code_stride, group, groups,
    NIBBLES: tl.constexpr, MIDDLE_CODE: tl.constexpr, HAS_ZEROS: tl.constexpr, FP8_MODE: tl.constexpr,
    ROWS: tl.constexpr, OUTS: tl.constexpr, INS: tl.constexpr,
):  # fmt: skip
    """Grid: (tiles of OUTS outputs, tiles of ROWS rows).

    x: [n, ins]; codes: [outs, code_stride] bytes; scales: float32 [outs, groups]; zeros: int16 alike; out:
    [n, outs]. A tile of inputs is in one group, so that its product is scaled as a whole.
    """
    column = tl.program_id(0) * OUTS + tl.arange(0, OUTS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    row_there, column_there = row < n, column < outs
    x_row = x + row.to(tl.int64)[:, None] * ins
    code_column = codes + column.to(tl.int64)[None, :] * code_stride
    sums = tl.zeros((ROWS, OUTS), dtype=tl.float32)
    for start in range(0, ins, INS):
        at = column.to(tl.int64) * groups + start // group
        scale = tl.load(scales + at, mask=column_there, other=0.0)
        if HAS_ZEROS:
            zero = tl.load(zeros + at, mask=column_there, other=0)
        else:
            zero = tl.full((OUTS,), MIDDLE_CODE, dtype=tl.int16)
        product = tl.zeros((ROWS, OUTS), dtype=tl.float32)
        if NIBBLES:
            byte = tl.arange(0, INS // 2)
            low = start + byte // 16 * 32 + byte % 16
            both = tl.load(code_column + (start // 2 + byte)[:, None], mask=column_there[None, :], other=0)
            a = tl.load(x_row + low[None, :], mask=row_there[:, None] & (low < ins)[None, :], other=0.0)
            b = centred(both & 15, zero, x.dtype.element_ty, 0)
            product = tl.dot(a, b, product, input_precision="tf32x3")
            high = low + 16
            a = tl.load(x_row + high[None, :], mask=row_there[:, None] & (high < ins)[None, :], other=0.0)
            b = centred(both >> 4, zero, x.dtype.element_ty, 0)
            product = tl.dot(a, b, product, input_precision="tf32x3")
        else:
            k = start + tl.arange(0, INS)
            there = k < ins
            values = tl.load(code_column + k[:, None], mask=column_there[None, :] & there[:, None], other=0)
            a = tl.load(x_row + k[None, :], mask=row_there[:, None] & there[None, :], other=0.0)
            b = centred(values, zero, x.dtype.element_ty, FP8_MODE)
            product = tl.dot(a, b, product, input_precision="tf32x3")
        sums += product * scale[None, :]
    target = out + row.to(tl.int64)[:, None] * outs + column[None, :]
    tl.store(target, sums.to(out.dtype.element_ty), mask=row_there[:, None] & column_there[None, :])


def quantised_constants(
    kind: Kind, choice: QuantisedChoice, *, has_zeros: bool, arch: int, interpreted: bool = False
) -> dict[str, object]:
    return {
        "NIBBLES": kind == "int4",
        "MIDDLE_CODE": MIDDLE[kind],
        "HAS_ZEROS": has_zeros,
        "FP8_MODE": fp8_mode(FP8, arch, interpreted) if kind == "fp8" else 0,
        "ROWS": choice.rows,
        "OUTS": choice.outs,
        "INS": choice.ins,
    }


def quantised_matmul(
    x: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor | None, *, kind: Kind, group: int
) -> Tensor:
    """As ``reference.quantised_matmul``, with groups of a multiple of 32 inputs, or one group."""
    if scales.shape[1] > 1 and group % _LEAST_INPUTS:
        return plain_matmul(x, codes, scales, zeros, kind=kind, group=group)
    if kind == "fp8" and can_scale(x, codes, scales):
        return scaled_matmul(x, codes, scales)
    (n, ins), outs = x.shape, len(codes)
    out = x.new_empty((n, outs))
    if n:
        # One group may have any size: its tiles are masked.
        size = group if scales.shape[1] > 1 else -(-ins // _MOST_INPUTS) * _MOST_INPUTS
        choice = QuantisedChoice.of(n, size, x.dtype)
        arch = architecture(x.device)
        constants = quantised_constants(
            kind, choice, has_zeros=zeros is not None, arch=arch, interpreted=not x.is_cuda
        )
        quantised_tile[(triton.cdiv(outs, choice.outs), triton.cdiv(n, choice.rows))](
            x.contiguous(), codes, scales, codes if zeros is None else zeros, out, n, outs, ins,
            codes.stride(0), size, scales.shape[1],
            **constants, num_warps=choice.num_warps, num_stages=choice.num_stages,
        )  # fmt: skip
    return out


def can_scale(x: Tensor, codes: Tensor, scales: Tensor) -> bool:
    """Whether the GPU multiplies float8 by float8 with a scale for each row and output."""
    fits = scales.shape[1] == 1 and x.dtype is torch.bfloat16 and not (x.shape[1] % 16 or len(codes) % 16)
    return fits and x.is_cuda and torch.cuda.get_device_capability(x.device) >= (9, 0)


def scaled_matmul(x: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    """x @ W.T with x in float8, too, each row with a scale: no element is off by more than 2^-4 of itself,
    and those below 2^-15 of the row's largest by 2^-19 of that."""
    wide = x.float()
    row_scales = (wide.abs().amax(1, keepdim=True) / _FP8_MAX).clamp_(min=1e-12)
    narrow = (wide / row_scales).to(FP8)
    return torch._scaled_mm(
        narrow, codes.view(FP8).T, scale_a=row_scales, scale_b=scales.T.contiguous(), out_dtype=x.dtype
    )
