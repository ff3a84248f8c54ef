"""Triton form of LoRA adapters, one for each row."""

# Triton is untyped, and its compile-time constants are capitals.
# mypy: disable-error-code="import-untyped,untyped-decorator,no-untyped-def"
# ruff: noqa: N803

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moonpool.kernels.triton.launch import padded

INS = 128  # inputs of a step of the first product
OUTS = 128  # outputs of a program of the second


@triton.jit(do_not_specialize_on_alignment=["ids", "low"])
def lora_down(x, a, ids, low, ins, rank, RANK: tl.constexpr, INS: tl.constexpr):
    """Grid: (n,). x: [n, ins]; a: [adapters, rank, ins]; low: float32 [n, rank], a[ids[i]] @ x[i]."""
    row = tl.program_id(0).to(tl.int64)
    adapter = tl.load(ids + row).to(tl.int64)
    if adapter >= 0:
        ranks = tl.arange(0, RANK)
        there = ranks < rank
        sums = tl.zeros((RANK,), dtype=tl.float32)
        for start in range(0, ins, INS):
            k = start + tl.arange(0, INS)
            k_there = k < ins
            value = tl.load(x + row * ins + k, mask=k_there, other=0.0).to(tl.float32)
            factor = tl.load(
                a + (adapter * rank + ranks[:, None]) * ins + k[None, :],
                mask=there[:, None] & k_there[None, :],
                other=0.0,
            ).to(tl.float32)
            sums += tl.sum(factor * value[None, :], 1)
        tl.store(low + row * rank + ranks, sums, mask=there)


@triton.jit(do_not_specialize_on_alignment=["ids", "scales", "low"])
def lora_up(y, b, ids, scales, low, outs, rank, RANK: tl.constexpr, OUTS: tl.constexpr):
    """Grid: (n, tiles of OUTS outputs). y: [n, outs], added to; b: [adapters, outs, rank]."""
    row = tl.program_id(0).to(tl.int64)
    adapter = tl.load(ids + row).to(tl.int64)
    if adapter >= 0:
        ranks = tl.arange(0, RANK)
        there = ranks < rank
        column = tl.program_id(1) * OUTS + tl.arange(0, OUTS)
        column_there = column < outs
        value = tl.load(low + row * rank + ranks, mask=there, other=0.0)
        factor = tl.load(
            b + (adapter * outs + column[:, None]) * rank + ranks[None, :],
            mask=column_there[:, None] & there[None, :],
            other=0.0,
        ).to(tl.float32)
        target = y + row * outs + column
        sums = tl.sum(factor * value[None, :], 1) * tl.load(scales + adapter)
        sums += tl.load(target, mask=column_there, other=0.0).to(tl.float32)
        tl.store(target, sums.to(y.dtype.element_ty), mask=column_there)


def add_lora(y: Tensor, x: Tensor, a: Tensor, b: Tensor, adapter_ids: Tensor, scales: Tensor) -> None:
    """As ``reference.add_lora``; all tensors contiguous."""
    n, ins = x.shape
    outs, rank = b.shape[1:]
    if not n:
        return
    low = x.new_empty((n, rank), dtype=torch.float32)
    width = padded(rank)
    lora_down[(n,)](x, a, adapter_ids, low, ins, rank, RANK=width, INS=INS, num_warps=4)
    grid = (n, triton.cdiv(outs, OUTS))
    lora_up[grid](y, b, adapter_ids, scales, low, outs, rank, RANK=width, OUTS=OUTS, num_warps=4)
