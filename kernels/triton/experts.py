"""Triton form of the matrix products of MoE experts."""

# Triton is untyped, and its compile-time constants are capitals.
# mypy: disable-error-code="import-untyped,untyped-decorator,no-untyped-def"
# ruff: noqa: N803

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from moonpool.kernels.triton.launch import padded


@dataclass(frozen=True, slots=True)
class GroupedChoice:
    """Tile of a product: rows, outputs and inputs."""

    rows: int
    outs: int
    ins: int
    num_warps: int
    num_stages: int

    @classmethod
    def of(cls, rows_per_expert: int, dtype: torch.dtype) -> GroupedChoice:
        """With few rows, reading the weights dominates, so tiles are narrow in rows."""
        ins = 32 if dtype is torch.float32 else 64
        if rows_per_expert <= 32:
            return cls(16, 64, ins, 4, 3)
        return cls(64, 128, ins, 8, 3)


@triton.jit(do_not_specialize_on_alignment=["offsets"])
def grouped_tile(
    x, weights, offsets, out, num_experts, outs, ins,
    EXPERTS: tl.constexpr, ROWS: tl.constexpr, OUTS: tl.constexpr, INS: tl.constexpr,
):  # fmt: skip
    """Grid: (at least the tiles of ROWS rows of all experts, tiles of OUTS outputs).

    x: [m, ins]; weights: [num_experts, outs, ins]; offsets: int32 [num_experts + 1]; out: [m, outs]. A
    program finds its expert by counting tiles, so the grid does not depend on the distribution of rows.
    """
    tile = tl.program_id(0)
    experts = tl.arange(0, EXPERTS)
    there = experts < num_experts
    starts = tl.load(offsets + experts, mask=there, other=0)
    ends = tl.load(offsets + experts + 1, mask=there, other=0)
    tiles = (ends - starts + ROWS - 1) // ROWS
    expert = tl.sum((tl.cumsum(tiles, 0) <= tile).to(tl.int32), 0)
    if expert < num_experts:
        first_tile = tl.sum(tl.where(experts < expert, tiles, 0), 0)
        first_row = tl.sum(tl.where(experts == expert, starts, 0), 0)
        row = first_row + (tile - first_tile) * ROWS + tl.arange(0, ROWS)
        row_there = row < tl.sum(tl.where(experts == expert, ends, 0), 0)
        column = tl.program_id(1) * OUTS + tl.arange(0, OUTS)
        column_there = column < outs
        x_row = x + row.to(tl.int64)[:, None] * ins
        w_row = weights + expert.to(tl.int64) * outs * ins + column.to(tl.int64)[None, :] * ins
        sums = tl.zeros((ROWS, OUTS), dtype=tl.float32)
        for start in range(0, ins, INS):
            k = start + tl.arange(0, INS)
            k_there = k < ins
            a = tl.load(x_row + k[None, :], mask=row_there[:, None] & k_there[None, :], other=0.0)
            b = tl.load(w_row + k[:, None], mask=column_there[None, :] & k_there[:, None], other=0.0)
            sums = tl.dot(a, b, sums, input_precision="tf32x3")
        target = out + row.to(tl.int64)[:, None] * outs + column[None, :]
        tl.store(target, sums.to(out.dtype.element_ty), mask=row_there[:, None] & column_there[None, :])


def grouped_constants(num_experts: int, choice: GroupedChoice) -> dict[str, object]:
    return {
        "EXPERTS": padded(num_experts),
        "ROWS": choice.rows,
        "OUTS": choice.outs,
        "INS": choice.ins,
    }


def grouped_matmul(x: Tensor, weights: Tensor, offsets: Tensor) -> Tensor:
    """As ``reference.grouped_matmul``."""
    m, ins = x.shape
    num_experts, outs, _ = weights.shape
    # Rows beyond the last expert's are not written.
    out = x.new_zeros((m, outs))
    if m:
        choice = GroupedChoice.of(m // num_experts, x.dtype)
        # Each expert has at most one partial tile.
        num_tiles = m // choice.rows + num_experts
        grouped_tile[(num_tiles, triton.cdiv(outs, choice.outs))](
            x.contiguous(), weights, offsets, out, num_experts, outs, ins,
            **grouped_constants(num_experts, choice), num_warps=choice.num_warps,
            num_stages=choice.num_stages,
        )  # fmt: skip
    return out
