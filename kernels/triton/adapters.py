"""Triton form of LoRA adapters, one for each row."""

# Triton is untyped, and its compile-time constants are capitals.
# mypy: disable-error-code="import-untyped,untyped-decorator,no-untyped-def"
# ruff: noqa: N803

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moonpool.kernels.reference.adapters import LINE_NBYTES
from moonpool.kernels.triton.launch import padded

INS = 128  # inputs of a step of the first product
OUTS = 128  # outputs of a program of the second
MAX_RANKS = 32  # ranks of a program of the first product, and of a step of the second


@triton.jit(do_not_specialize_on_alignment=["ids", "extents", "lines", "low"])
def lora_down(
    x,
    weights,
    ids,
    extents,
    lines,
    low,
    ins,
    width,
    LINE: tl.constexpr,
    RANKS: tl.constexpr,
    INS: tl.constexpr,
):
    """Grid: (n, tiles of RANKS ranks). x: [n, ins]; weights: [values]; extents: int32 [adapters, 2], first
    row of ``lines`` and rank; lines: int32 [rows, 2], where rows of A and B begin, in units of LINE values;
    low: float32 [n, width], the products of row i of x with its adapter's rows of A."""
    row = tl.program_id(0).to(tl.int64)
    adapter = tl.load(ids + row).to(tl.int64)
    if adapter >= 0:
        first = tl.load(extents + 2 * adapter).to(tl.int64)
        ranks = tl.program_id(1) * RANKS + tl.arange(0, RANKS)
        there = ranks < tl.load(extents + 2 * adapter + 1)
        begins = tl.load(lines + 2 * (first + ranks), mask=there, other=0).to(tl.int64) * LINE
        sums = tl.zeros((RANKS,), dtype=tl.float32)
        for start in range(0, ins, INS):
            k = start + tl.arange(0, INS)
            k_there = k < ins
            value = tl.load(x + row * ins + k, mask=k_there, other=0.0).to(tl.float32)
            factor = tl.load(
                weights + begins[:, None] + k[None, :], mask=there[:, None] & k_there[None, :], other=0.0
            ).to(tl.float32)
            sums += tl.sum(factor * value[None, :], 1)
        tl.store(low + row * width + ranks, sums, mask=there)


@triton.jit(do_not_specialize_on_alignment=["ids", "extents", "lines", "low"])
def lora_up(
    y,
    weights,
    ids,
    extents,
    lines,
    low,
    outs,
    stride,
    width,
    LINE: tl.constexpr,
    RANKS: tl.constexpr,
    OUTS: tl.constexpr,
):
    """Grid: (n, tiles of OUTS outputs). y: [n, outs] with rows ``stride`` apart; the others as above."""
    row = tl.program_id(0).to(tl.int64)
    adapter = tl.load(ids + row).to(tl.int64)
    if adapter >= 0:
        first = tl.load(extents + 2 * adapter).to(tl.int64)
        rank = tl.load(extents + 2 * adapter + 1)
        column = tl.program_id(1) * OUTS + tl.arange(0, OUTS)
        column_there = column < outs
        sums = tl.zeros((OUTS,), dtype=tl.float32)
        for start in range(0, rank, RANKS):
            ranks = start + tl.arange(0, RANKS)
            there = ranks < rank
            value = tl.load(low + row * width + ranks, mask=there, other=0.0)
            begins = tl.load(lines + 2 * (first + ranks) + 1, mask=there, other=0).to(tl.int64) * LINE
            factor = tl.load(
                weights + begins[:, None] + column[None, :],
                mask=there[:, None] & column_there[None, :],
                other=0.0,
            ).to(tl.float32)
            sums += tl.sum(factor * value[:, None], 0)
        target = y + row * stride + column
        sums += tl.load(target, mask=column_there, other=0.0).to(tl.float32)
        tl.store(target, sums.to(y.dtype.element_ty), mask=column_there)


def add_lora(
    y: Tensor, x: Tensor, weights: Tensor, adapter_ids: Tensor, extents: Tensor, lines: Tensor, max_rank: int
) -> None:
    """As ``reference.add_lora``; all tensors but ``y`` contiguous, and its rows."""
    (n, ins), outs = x.shape, y.shape[1]
    if not n:
        return
    low = x.new_empty((n, max_rank), dtype=torch.float32)
    ranks, line = min(padded(max_rank), MAX_RANKS), LINE_NBYTES // weights.itemsize
    lora_down[(n, triton.cdiv(max_rank, ranks))](
        *(x, weights, adapter_ids, extents, lines, low, ins, max_rank),
        LINE=line,
        RANKS=ranks,
        INS=INS,
        num_warps=4,
    )
    lora_up[(n, triton.cdiv(outs, OUTS))](
        *(y, weights, adapter_ids, extents, lines, low, outs, y.stride(0), max_rank),
        LINE=line,
        RANKS=ranks,
        OUTS=OUTS,
        num_warps=4,
    )
