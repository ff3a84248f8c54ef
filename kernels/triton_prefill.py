"""Triton form of causal attention of many new tokens over cached and new pages."""

# Triton has no types to check, and its code has compile-time constants in capitals.
# mypy: disable-error-code="import-untyped,untyped-decorator,no-untyped-def"
# ruff: noqa: N803, N806

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton_decode import padded


@triton.jit
def sequence_of(tile, starts, batch, TOKENS: tl.constexpr, STEPS: tl.constexpr):
    """Which sequence tile number ``tile`` belongs to: the last i with starts[i] // TOKENS + i <= tile.

    So many tile numbers are enough for any lengths, and the host need not know them.
    """
    low = tl.zeros([], tl.int32)
    high = batch - 1 + tl.zeros([], tl.int32)
    for _ in range(STEPS):
        middle = (low + high + 1) // 2
        here = tl.load(starts + middle) // TOKENS + middle <= tile
        low = tl.where(here, middle, low)
        high = tl.where(here, high, middle - 1)
    return low


@triton.jit
def attend_tiles(
    query,
    position,
    top,
    total,
    gathered,
    pool,
    table_row,
    first,
    begin,
    end,
    context,
    block_stride,
    kv_stride,
    scale,
    window,
    soft_cap,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    CAPPED: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Takes key tiles begin … end - 1 into the online softmax. MASKED: some keys are unseen by some rows."""
    dims = tl.arange(0, DIM_PADDED)
    for start in range(begin, end, TILE):
        token = start + tl.arange(0, TILE)
        if MASKED:
            exists = (token >= first) & (token < context)
            block = tl.load(table_row + token // BLOCK_SIZE, mask=exists, other=0)
            readable = exists[:, None] & (dims < DIM)[None, :]
        else:
            block = tl.load(table_row + token // BLOCK_SIZE)
            readable = (dims < DIM)[None, :]
        place = block.to(tl.int64) * block_stride + (token % BLOCK_SIZE) * DIM
        k = tl.load(pool + place[:, None] + dims[None, :], mask=readable, other=0.0)
        scores = tl.dot(query, tl.trans(k), input_precision="tf32x3") * scale
        if CAPPED:
            scores = soft_cap * (1 - 2 / (tl.exp2(scores * (2 * 1.4426950408889634 / soft_cap)) + 1))
        scores = scores * 1.4426950408889634
        if MASKED:
            seen = (token[None, :] <= position[:, None]) & exists[None, :]
            seen = seen & ((window == 0) | (token[None, :] > position[:, None] - window))
            scores = tl.where(seen, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        # A row that has seen nothing yet stays at zero instead of becoming NaN.
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(scores - base[:, None])
        factor = tl.exp2(top - base)
        total = total * factor + tl.sum(weights, 1)
        v = tl.load(pool + kv_stride + place[:, None] + dims[None, :], mask=readable, other=0.0)
        gathered = gathered * factor[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="tf32x3")
        top = new_top
    return top, total, gathered


@triton.jit
def prefill_tile(
    q,
    pool,
    table,
    starts,
    contexts,
    out,
    layer_offset,
    block_stride,
    kv_stride,
    head_stride,
    table_stride,
    batch,
    scale,
    window,
    soft_cap,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    CAPPED: tl.constexpr,
    STEPS: tl.constexpr,
):
    """ROWS // GROUP tokens of one sequence, with all query heads of one kv head.

    Grid: (num_tokens // (ROWS // GROUP) + batch, num_kv_heads). q, out: [num_tokens, num_heads, DIM].
    """
    TOKENS: tl.constexpr = ROWS // GROUP
    head = tl.program_id(1)
    num_heads = tl.num_programs(1) * GROUP
    sequence = sequence_of(tl.program_id(0), starts, batch, TOKENS, STEPS)
    start = tl.load(starts + sequence)
    num_new = tl.load(starts + sequence + 1) - start
    first_token = (tl.program_id(0) - (start // TOKENS + sequence)) * TOKENS
    if first_token >= num_new:
        return
    context = tl.load(contexts + sequence)
    first_position = context - num_new + first_token

    row = tl.arange(0, ROWS)
    dims = tl.arange(0, DIM_PADDED)
    token, member = first_token + row // GROUP, row % GROUP
    valid = (row < TOKENS * GROUP) & (token < num_new)
    position = tl.where(valid, context - num_new + token, first_position)
    at = (start + token).to(tl.int64) * num_heads + head * GROUP + member
    mask = valid[:, None] & (dims < DIM)[None, :]
    query = tl.load(q + at[:, None] * DIM + dims[None, :], mask=mask, other=0.0)
    pool += layer_offset + head.to(tl.int64) * head_stride
    table_row = table + sequence.to(tl.int64) * table_stride

    last_position = tl.minimum(first_position + TOKENS, context) - 1
    first = tl.where(window > 0, tl.maximum(first_position - window + 1, 0), 0)
    # Tiles that every row sees whole need no mask: all before the first query, unless there is a window.
    begin = first // TILE * TILE
    plain_end = tl.where(window > 0, begin, (first_position + 1) // TILE * TILE)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    gathered = tl.zeros([ROWS, DIM_PADDED], tl.float32)
    top, total, gathered = attend_tiles(
        query, position, top, total, gathered, pool, table_row, first, begin, plain_end, context,
        block_stride, kv_stride, scale, window, soft_cap, DIM, DIM_PADDED, BLOCK_SIZE, TILE, CAPPED, False,
    )  # fmt: skip
    top, total, gathered = attend_tiles(
        query, position, top, total, gathered, pool, table_row, first, plain_end, last_position + 1, context,
        block_stride, kv_stride, scale, window, soft_cap, DIM, DIM_PADDED, BLOCK_SIZE, TILE, CAPPED, True,
    )  # fmt: skip
    gathered = gathered / total[:, None]
    tl.store(out + at[:, None] * DIM + dims[None, :], gathered.to(out.dtype.element_ty), mask=mask)


@dataclass(frozen=True, slots=True)
class PrefillChoice:
    """How a shape is launched: from a table, never from measuring at import."""

    rows: int
    tile: int
    num_warps: int
    num_stages: int

    @classmethod
    def of(cls, head_dim: int, dtype: torch.dtype, arch: int = 90) -> PrefillChoice:
        """arch: 80, 90 …, the compute capability. float32 is exact rather than fast: three products for
        one."""
        if dtype.itemsize == 4:
            if head_dim <= 64:
                return cls(rows=32, tile=32, num_warps=8, num_stages=2)
            return cls(rows=16, tile=32 if head_dim <= 128 else 16, num_warps=4, num_stages=2)
        if head_dim <= 64 or (head_dim <= 128 and arch >= 90):
            return cls(rows=128, tile=64, num_warps=8, num_stages=3)
        return cls(rows=64, tile=64 if head_dim <= 128 else 32, num_warps=8, num_stages=2)


@cache
def architecture(device: torch.device) -> int:
    """The compute capability as one number; 90 where there is no GPU (the interpreter)."""
    if device.type != "cuda":
        return 90
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def prefill_constants(
    group: int, head_dim: int, block_size: int, batch: int, choice: PrefillChoice, capped: bool
) -> dict[str, Any]:
    return {
        "GROUP": group,
        "ROWS": max(choice.rows, padded(group)),
        "DIM": head_dim,
        "DIM_PADDED": padded(head_dim, 16),
        "BLOCK_SIZE": block_size,
        "TILE": choice.tile,
        "CAPPED": capped,
        "STEPS": batch.bit_length(),  # of a binary search among them
    }


def paged_prefill_attention(
    q: Tensor,
    pool: Tensor,
    layer: int,
    block_table: Tensor,
    cu_seqlens_q: Tensor,
    context_lens: Tensor,
    *,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
    out: Tensor | None = None,
) -> Tensor:
    """As ``reference.paged_prefill_attention``."""
    num_tokens, num_heads, head_dim = q.shape
    batch, num_kv_heads, block_size = block_table.shape[0], pool.shape[3], pool.shape[4]
    out = torch.empty_like(q) if out is None else out
    if num_tokens == 0:
        return out
    choice = PrefillChoice.of(head_dim, q.dtype, architecture(q.device))
    group = num_heads // num_kv_heads
    constants = prefill_constants(group, head_dim, block_size, batch, choice, soft_cap > 0)
    strides = pool.stride()
    prefill_tile[(num_tokens // (constants["ROWS"] // group) + batch, num_kv_heads)](
        q,
        pool,
        block_table,
        cu_seqlens_q,
        context_lens,
        out,
        layer * strides[1],
        strides[0],
        strides[2],
        strides[3],
        block_table.stride(0),
        batch,
        scale,
        window,
        soft_cap,
        **constants,
        num_warps=choice.num_warps,
        num_stages=choice.num_stages,
    )
    return out
