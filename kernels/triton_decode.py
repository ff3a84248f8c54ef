"""Triton form of attention of one query token a sequence: the context in parts, side by side, then their
merge."""

# Triton has no types to check, and its code has compile-time constants in capitals.
# mypy: disable-error-code="import-untyped,untyped-decorator,no-untyped-def"
# ruff: noqa: N803

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

LN_2 = math.log(2)


@triton.jit
def decode_part(
    q,
    pool,
    table,
    contexts,
    out,
    lse,
    layer_offset,
    block_stride,
    kv_stride,
    head_stride,
    table_stride,
    scale,
    window,
    soft_cap,
    num_parts,
    GROUP: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    CAPPED: tl.constexpr,
):
    """One part of one sequence's context, for the query heads of one kv head.

    Grid: (batch, num_kv_heads, num_parts). q: [batch, num_heads, DIM]; out: float32 [num_parts, batch,
    num_heads, DIM]; lse: float32 [num_parts, batch, num_heads], the base-2 logarithm of the sum of
    exponentials, -inf where the part is empty. Where there is one part only, out is the result itself, in its
    dtype, and lse is not written.
    """
    sequence, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    num_heads = tl.num_programs(1) * GROUP
    context = tl.load(contexts + sequence)
    first = tl.where(window > 0, tl.maximum(context - window, 0), 0)
    # Parts are whole tiles on an absolute grid: only the first and last tile of the context are masked.
    first_tile = first // TILE
    tiles = tl.cdiv(context, TILE) - first_tile
    tiles_per_part = tl.cdiv(tiles, num_parts)
    begin = (first_tile + part * tiles_per_part) * TILE
    end = tl.minimum(begin + tiles_per_part * TILE, context)

    member = tl.arange(0, GROUP_PADDED)
    dims = tl.arange(0, DIM_PADDED)
    rows = (sequence * num_heads + head * GROUP + member).to(tl.int64)
    valid = (member < GROUP)[:, None] & (dims < DIM)[None, :]
    query = tl.load(q + rows[:, None] * DIM + dims[None, :], mask=valid, other=0.0)
    pool += layer_offset + head.to(tl.int64) * head_stride

    top = tl.full([GROUP_PADDED], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_PADDED], tl.float32)
    gathered = tl.zeros([GROUP_PADDED, DIM_PADDED], tl.float32)
    for start in range(begin, end, TILE):
        token = start + tl.arange(0, TILE)
        seen = (token >= first) & (token < end)
        block = tl.load(table + sequence * table_stride + token // BLOCK_SIZE, mask=seen, other=0)
        place = block.to(tl.int64) * block_stride + (token % BLOCK_SIZE) * DIM
        readable = seen[:, None] & (dims < DIM)[None, :]
        k = tl.load(pool + place[:, None] + dims[None, :], mask=readable, other=0.0)
        scores = tl.dot(query, tl.trans(k), input_precision="tf32x3") * scale
        if CAPPED:
            # tanh through exp2: exact at both ends.
            scores = soft_cap * (1 - 2 / (tl.exp2(scores * (2 * 1.4426950408889634 / soft_cap)) + 1))
        scores = tl.where(seen[None, :], scores * 1.4426950408889634, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - new_top[:, None])
        factor = tl.exp2(top - new_top)
        total = total * factor + tl.sum(weights, 1)
        v = tl.load(pool + kv_stride + place[:, None] + dims[None, :], mask=readable, other=0.0)
        gathered = gathered * factor[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="tf32x3")
        top = new_top

    gathered = gathered / tl.where(total > 0, total, 1.0)[:, None]
    at = rows + part.to(tl.int64) * tl.num_programs(0) * num_heads
    tl.store(out + at[:, None] * DIM + dims[None, :], gathered.to(out.dtype.element_ty), mask=valid)
    if num_parts > 1:
        log = top + tl.log2(tl.where(total > 0, total, 1.0))
        tl.store(lse + at, tl.where(total > 0, log, float("-inf")), mask=member < GROUP)


@triton.jit
def merge_parts(
    parts,
    lse,
    out,
    merged_lse,
    num_rows,
    num_parts,
    WRITE_LSE: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    PARTS_PADDED: tl.constexpr,
):
    """The parts of one query head, weighted by the share of the exponentials each saw.

    Grid: (num_rows,). parts: float32 [num_parts, num_rows, DIM]; lse: base 2, [num_parts, num_rows]. The sum
    runs over the parts in a fixed order. A row that saw nothing at all gives zeros. merged_lse: base 2,
    [num_rows].
    """
    row = tl.program_id(0).to(tl.int64)
    part, dims = tl.arange(0, PARTS_PADDED), tl.arange(0, DIM_PADDED)
    there = part < num_parts
    logs = tl.load(lse + part * num_rows + row, mask=there, other=float("-inf"))
    top = tl.max(logs, 0)
    weights = tl.where(logs == float("-inf"), 0.0, tl.exp2(logs - tl.where(top == float("-inf"), 0.0, top)))
    readable = (there & (weights > 0))[:, None] & (dims < DIM)[None, :]
    at = (part.to(tl.int64) * num_rows + row)[:, None] * DIM + dims[None, :]
    values = tl.load(parts + at, mask=readable, other=0.0)
    total = tl.sum(weights, 0)
    merged = tl.sum(values * weights[:, None], 0) / tl.where(total > 0, total, 1.0)
    tl.store(out + row * DIM + dims, merged.to(out.dtype.element_ty), mask=dims < DIM)
    if WRITE_LSE:
        log = top + tl.log2(tl.where(total > 0, total, 1.0))
        tl.store(merged_lse + row, tl.where(total > 0, log, float("-inf")))


@dataclass(frozen=True, slots=True)
class DecodeChoice:
    """How a shape is launched: from a table, never from measuring at import."""

    tile: int
    num_warps: int
    num_stages: int

    @classmethod
    def of(cls, head_dim: int, dtype: torch.dtype) -> DecodeChoice:
        wide = dtype.itemsize == 4
        if head_dim <= 64:
            return cls(tile=64, num_warps=4, num_stages=2 if wide else 3)
        if head_dim <= 128:
            return cls(tile=32 if wide else 64, num_warps=4, num_stages=2 if wide else 3)
        return cls(tile=32, num_warps=8 if wide else 4, num_stages=2)


MAX_PARTS = 64
# Programs that fill a large GPU twice over (132 multiprocessors), and the fewest tokens worth a program of
# its own.
WANTED_PROGRAMS = 264
FEWEST_TOKENS = 256


def parts_for(batch: int, num_kv_heads: int, max_context: int) -> int:
    """Into how many parts the contexts are cut: enough programs to fill the device, none of them tiny."""
    wanted = -(-WANTED_PROGRAMS // max(1, batch * num_kv_heads))
    return max(1, min(wanted, -(-max_context // FEWEST_TOKENS), MAX_PARTS))


def padded(n: int, least: int = 1) -> int:
    """The next power of two, which is what Triton's ranges come in."""
    return max(least, 1 << (n - 1).bit_length())


def decode_constants(group: int, head_dim: int, block_size: int, tile: int, capped: bool) -> dict[str, Any]:
    return {
        "GROUP": group,
        "GROUP_PADDED": padded(group, 16),  # the tensor cores take 16 rows at least
        "DIM": head_dim,
        "DIM_PADDED": padded(head_dim, 16),
        "BLOCK_SIZE": block_size,
        "TILE": tile,
        "CAPPED": capped,
    }


def merge(parts: Tensor, lse: Tensor, out: Tensor, merged_lse: Tensor | None = None) -> None:
    """parts: [num_parts, …, head_dim]; lse: base 2, [num_parts, …]. Fills out: […, head_dim]."""
    num_rows, head_dim = lse[0].numel(), out.shape[-1]
    if num_rows:
        merge_parts[(num_rows,)](
            parts,
            lse,
            out,
            lse if merged_lse is None else merged_lse,
            num_rows,
            parts.shape[0],
            WRITE_LSE=merged_lse is not None,
            DIM=head_dim,
            DIM_PADDED=padded(head_dim, 16),
            PARTS_PADDED=padded(parts.shape[0]),
            num_warps=4,
        )


def merge_attention_states(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """As ``reference.merge_attention_states``."""
    out, lse = torch.empty_like(outs[0]), torch.empty_like(lses[0])
    merge(outs, lses / LN_2, out, lse)
    return out, lse * LN_2


def paged_decode_attention(
    q: Tensor,
    pool: Tensor,
    layer: int,
    block_table: Tensor,
    context_lens: Tensor,
    *,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
    out: Tensor | None = None,
    num_parts: int | None = None,
) -> Tensor:
    """As ``reference.paged_decode_attention``; ``num_parts`` overrides how far the contexts are cut."""
    batch, num_heads, head_dim = q.shape
    num_kv_heads, block_size = pool.shape[3], pool.shape[4]
    out = torch.empty_like(q) if out is None else out
    if batch == 0:
        return out
    choice = DecodeChoice.of(head_dim, q.dtype)
    if num_parts is None:
        num_parts = parts_for(batch, num_kv_heads, block_table.shape[1] * block_size)
    if num_parts == 1:
        parts, lse = out, out
    else:
        parts = torch.empty((num_parts, *q.shape), dtype=torch.float32, device=q.device)
        lse = torch.empty((num_parts, batch, num_heads), dtype=torch.float32, device=q.device)
    strides = pool.stride()
    decode_part[(batch, num_kv_heads, num_parts)](
        q,
        pool,
        block_table,
        context_lens,
        parts,
        lse,
        layer * strides[1],
        strides[0],
        strides[2],
        strides[3],
        block_table.stride(0),
        scale,
        window,
        soft_cap,
        num_parts,
        **decode_constants(num_heads // num_kv_heads, head_dim, block_size, choice.tile, soft_cap > 0),
        num_warps=choice.num_warps,
        num_stages=choice.num_stages,
    )
    if num_parts > 1:
        merge(parts, lse, out)
    return out
