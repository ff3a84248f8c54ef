"""Triton forms of operations on rows of activations."""

# Triton is untyped, and its compile-time constants are capitals.
# mypy: disable-error-code="import-untyped,untyped-decorator,no-untyped-def"
# ruff: noqa: N803

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moonpool.kernels import reference
from moonpool.kernels.triton.launch import padded


@triton.jit
def norm_row(x, residual, weight, normed, total, hidden, eps, ADD: tl.constexpr, WIDTH: tl.constexpr):
    """Grid: (n,). x, residual, normed, total: [n, hidden]; residual and total are used only with ADD."""
    offset = tl.program_id(0).to(tl.int64) * hidden
    column = tl.arange(0, WIDTH)
    there = column < hidden
    values = tl.load(x + offset + column, mask=there, other=0.0).to(tl.float32)
    if ADD:
        values += tl.load(residual + offset + column, mask=there, other=0.0).to(tl.float32)
        rounded = values.to(total.dtype.element_ty)
        tl.store(total + offset + column, rounded, mask=there)
        values = rounded.to(tl.float32)  # the value that the next layer gets
    scale = tl.rsqrt(tl.sum(values * values, 0) / hidden + eps)
    scaled = values * scale * tl.load(weight + column, mask=there, other=0.0).to(tl.float32)
    tl.store(normed + offset + column, scaled.to(normed.dtype.element_ty), mask=there)


@triton.jit
def silu_mul_tile(gate_up, out, inter, WIDTH: tl.constexpr):
    """Grid: (n, tiles of WIDTH columns). gate_up: [n, 2 * inter]; out: [n, inter]."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    there = column < inter
    gate = tl.load(gate_up + row * 2 * inter + column, mask=there, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * inter + inter + column, mask=there, other=0.0).to(tl.float32)
    value = gate / (1 + tl.exp(-gate)) * up
    tl.store(out + row * inter + column, value.to(out.dtype.element_ty), mask=there)


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, *, residual: Tensor | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    """As ``reference.rms_norm``."""
    if not x.is_contiguous():
        return reference.rms_norm(x, weight, eps, residual=residual)
    n, hidden = x.shape
    normed = torch.empty_like(x)
    total = normed if residual is None else torch.empty_like(x)
    if n:
        width = padded(hidden)
        norm_row[(n,)](
            x, x if residual is None else residual, weight, normed, total, hidden, eps,
            ADD=residual is not None, WIDTH=width, num_warps=max(1, min(16, width // 512)),
        )  # fmt: skip
    return normed if residual is None else (normed, total)


def silu_mul(gate_up: Tensor) -> Tensor:
    """As ``reference.silu_mul``."""
    if not gate_up.is_contiguous():
        return reference.silu_mul(gate_up)
    n, inter = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty((n, inter))
    if n:
        width = min(1024, padded(inter))
        silu_mul_tile[(n, triton.cdiv(inter, width))](gate_up, out, inter, WIDTH=width, num_warps=4)
    return out
