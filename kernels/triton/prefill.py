"""Triton form of prefill attention: many new tokens over cached and new blocks."""

# Triton is untyped, and its compile-time constants are capitals.
# mypy: disable-error-code="import-untyped,untyped-decorator,no-untyped-def"
# ruff: noqa: N803, N806

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from moonpool.kernels.triton.fp8 import as_bytes, fp8_mode, halves_of, widened
from moonpool.kernels.triton.launch import (
    PrefillChoice,
    architecture,
    heads_of_latents,
    padded,
    prefill_choice,
)


@triton.jit
def sequence_of(tile, starts, batch, TOKENS: tl.constexpr, STEPS: tl.constexpr):
    """The sequence of tile number ``tile``: the last i with starts[i] // TOKENS + i <= tile.

    With this numbering the size of the grid does not depend on the lengths, which the host need not know.
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
    query, query_rest, position, top, total, gathered, odd, pool, table_row, first, begin, end, context,
    block_stride, kv_stride, scale, window, soft_cap,
    DIM: tl.constexpr, DIM_PADDED: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
    CAPPED: tl.constexpr, FP8: tl.constexpr, REST: tl.constexpr, REST_PADDED: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Add key tiles begin … end - 1 to the online softmax. MASKED: some rows do not see all keys.

    With float8, ``gathered`` has the even columns and ``odd`` the odd ones, as in ``decode_partition``.
    """
    WIDTH: tl.constexpr = DIM + REST
    dims = tl.arange(0, DIM_PADDED)
    rests = tl.arange(0, REST_PADDED)
    pairs = tl.arange(0, DIM_PADDED // 2)
    # Converts scores to exponents of two.
    unit = 1.4426950408889634 if CAPPED else scale * 1.4426950408889634
    for start in range(begin, end, TILE):
        token = start + tl.arange(0, TILE)
        exists = (token >= first) & (token < context)
        if not MASKED:
            exists = token >= 0
        if BLOCK_SIZE % TILE == 0:
            # Tiles are aligned, so that each lies in one block.
            offset = tl.load(table_row + start // BLOCK_SIZE).to(tl.int64) * block_stride
            offset += ((start % BLOCK_SIZE) + tl.arange(0, TILE)) * WIDTH
        else:
            block = tl.load(table_row + token // BLOCK_SIZE, mask=exists, other=0)
            offset = block.to(tl.int64) * block_stride + (token % BLOCK_SIZE) * WIDTH
        readable = exists[:, None] & (dims < DIM)[None, :]
        stored = tl.load(pool + offset[:, None] + REST + dims[None, :], mask=readable, other=0)
        k = widened(stored, query.dtype, FP8)
        scores = tl.dot(query, tl.trans(k), input_precision="tf32x3")
        if REST > 0:
            there = exists[:, None] & (rests < REST)[None, :]
            stored = tl.load(pool + offset[:, None] + rests[None, :], mask=there, other=0)
            k = widened(stored, query.dtype, FP8)
            scores = tl.dot(query_rest, tl.trans(k), scores, input_precision="tf32x3")
        if CAPPED:
            scores *= scale
            scores = soft_cap * (1 - 2 / (tl.exp2(scores * (2 * 1.4426950408889634 / soft_cap)) + 1))
        if MASKED:
            seen = (token[None, :] <= position[:, None]) & exists[None, :]
            seen = seen & ((window == 0) | (token[None, :] > position[:, None] - window))
            scores = tl.where(seen, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1) * unit)
        # A row that has seen no key stays at zero instead of becoming NaN.
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(scores * unit - base[:, None])
        factor = tl.exp2(top - base)
        total = total * factor + tl.sum(weights, 1)
        if FP8 == 0:
            v = tl.load(pool + kv_stride + offset[:, None] + REST + dims[None, :], mask=readable, other=0)
            gathered = tl.dot(weights.to(v.dtype), v, gathered * factor[:, None], input_precision="tf32x3")
        else:
            words = (pool + kv_stride).to(tl.pointer_type(tl.uint16))
            there = exists[:, None] & (pairs < DIM // 2)[None, :]
            both = tl.load(words + ((offset + REST) // 2)[:, None] + pairs[None, :], mask=there, other=0)
            probabilities = weights.to(tl.float16)
            gathered = tl.dot(probabilities, halves_of(both & 0xFF, FP8), gathered * factor[:, None])
            odd = tl.dot(probabilities, halves_of(both >> 8, FP8), odd * factor[:, None])
        top = new_top
    return top, total, gathered, odd


# Values and addresses that change from step to step are not specialized, so that nothing compiles while
# serving.
@triton.jit(
    do_not_specialize=["table_stride", "batch", "window"],
    do_not_specialize_on_alignment=["table", "starts", "positions", "contexts", "lse"],
)
def prefill_tile(
    q, pool, table, starts, positions, contexts, out, lse, layer_offset, block_stride, kv_stride,
    head_stride, table_stride, batch, scale, v_scale, window, soft_cap,
    GROUP: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, DIM_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, CAPPED: tl.constexpr, STEPS: tl.constexpr,
    POSITIONS: tl.constexpr, WRITE_LSE: tl.constexpr, FP8: tl.constexpr, REST: tl.constexpr,
    REST_PADDED: tl.constexpr,
):  # fmt: skip
    """ROWS // GROUP tokens of one sequence, with all query heads of one kv head.

    Grid: (num_tokens // (ROWS // GROUP) + batch, num_kv_heads). q, out: [num_tokens, num_heads, DIM]; lse:
    float32 [num_tokens, num_heads]; positions: int32 [batch], of the first query, read only with POSITIONS.
    Before the DIM elements of a head are REST ones that only scores use.
    """
    WIDTH: tl.constexpr = DIM + REST
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
    before = context - num_new
    if POSITIONS:
        before = tl.load(positions + sequence)
    first_position = before + first_token

    row = tl.arange(0, ROWS)
    dims = tl.arange(0, DIM_PADDED)
    token, member = first_token + row // GROUP, row % GROUP
    valid = (row < TOKENS * GROUP) & (token < num_new)
    position = tl.where(valid, before + token, first_position)
    at = (start + token).to(tl.int64) * num_heads + head * GROUP + member
    mask = valid[:, None] & (dims < DIM)[None, :]
    query = tl.load(q + at[:, None] * WIDTH + REST + dims[None, :], mask=mask, other=0.0)
    query_rest = query
    if REST > 0:
        rests = tl.arange(0, REST_PADDED)
        with_rest = valid[:, None] & (rests < REST)[None, :]
        query_rest = tl.load(q + at[:, None] * WIDTH + rests[None, :], mask=with_rest, other=0.0)
    pool += layer_offset + head.to(tl.int64) * head_stride
    table_row = table + sequence.to(tl.int64) * table_stride

    end = tl.minimum(tl.minimum(first_position + TOKENS, before + num_new), context)
    first = tl.where(window > 0, tl.maximum(first_position - window + 1, 0), 0)
    # Tiles that every row sees completely need no mask: all before the first query, without a window.
    begin = first // TILE * TILE
    seen_by_all = tl.maximum(tl.minimum(first_position + 1, context), 0)
    plain_end = tl.where(window > 0, begin, seen_by_all // TILE * TILE)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    gathered = tl.zeros([ROWS, DIM_PADDED if FP8 == 0 else DIM_PADDED // 2], tl.float32)
    odd = tl.zeros([ROWS, 1 if FP8 == 0 else DIM_PADDED // 2], tl.float32)
    top, total, gathered, odd = attend_tiles(
        query, query_rest, position, top, total, gathered, odd, pool, table_row, first, begin, plain_end,
        context, block_stride, kv_stride, scale, window, soft_cap, DIM, DIM_PADDED, BLOCK_SIZE, TILE, CAPPED,
        FP8, REST, REST_PADDED, False,
    )  # fmt: skip
    top, total, gathered, odd = attend_tiles(
        query, query_rest, position, top, total, gathered, odd, pool, table_row, first, plain_end, end,
        context, block_stride, kv_stride, scale, window, soft_cap, DIM, DIM_PADDED, BLOCK_SIZE, TILE, CAPPED,
        FP8, REST, REST_PADDED, True,
    )  # fmt: skip
    if FP8 != 0:
        gathered = tl.interleave(gathered, odd)
    gathered = gathered * (v_scale / tl.where(total == 0, 1.0, total))[:, None]
    if WRITE_LSE:
        log = tl.where(total == 0, float("-inf"), (top + tl.log2(total)) * 0.6931471805599453)
        tl.store(lse + at, log, mask=valid)
    tl.store(out + at[:, None] * WIDTH + REST + dims[None, :], gathered.to(out.dtype.element_ty), mask=mask)


def prefill_constants(
    *, group: int, head_dim: int, block_size: int, batch: int, choice: PrefillChoice, key_only: int = 0
) -> dict[str, Any]:
    return {
        "GROUP": group,
        "ROWS": max(choice.rows, padded(group)),
        "DIM": head_dim - key_only,
        "DIM_PADDED": padded(head_dim - key_only, 16),
        "REST": key_only,
        "REST_PADDED": padded(key_only, 16) if key_only else 1,
        "BLOCK_SIZE": block_size,
        "TILE": choice.tile,
        "STEPS": max(10, batch.bit_length()),  # of the binary search in sequence_of
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
    q_positions: Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    key_only: int = 0,
    max_q_len: int = 0,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> Tensor:
    """As ``reference.paged_prefill_attention``; ``max_q_len`` changes nothing."""
    num_tokens, num_heads, head_dim = q.shape
    batch, num_kv_heads, block_size = block_table.shape[0], pool.shape[3], pool.shape[4]
    out = torch.empty_like(q) if out is None else out
    if num_tokens == 0:
        return out
    arch = architecture(q.device)
    choice = prefill_choice(head_dim, q.dtype, pool.dtype, arch)
    strides = pool.stride()
    if key_only and num_kv_heads == 1:
        num_kv_heads, strides = heads_of_latents(num_heads), (*strides[:3], 0)
    group = num_heads // num_kv_heads
    constants = prefill_constants(
        group=group, head_dim=head_dim, block_size=block_size, batch=batch, choice=choice, key_only=key_only
    )
    prefill_tile[(num_tokens // (constants["ROWS"] // group) + batch, num_kv_heads)](
        q, as_bytes(pool), block_table, cu_seqlens_q,
        context_lens if q_positions is None else q_positions, context_lens, out,
        context_lens if lse is None else lse, layer * strides[1], strides[0], strides[2], strides[3],
        block_table.stride(0), batch, scale * k_scale, v_scale, window, soft_cap,
        **constants, CAPPED=soft_cap > 0, POSITIONS=q_positions is not None, WRITE_LSE=lse is not None,
        FP8=fp8_mode(pool.dtype, arch, not q.is_cuda), num_warps=choice.num_warps,
        num_stages=choice.num_stages,
    )  # fmt: skip
    return out
