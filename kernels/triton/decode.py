"""Triton form of decode attention: partitions of the contexts in parallel, then their merge."""

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
    DecodeChoice,
    architecture,
    decode_choice,
    heads_of_latents,
    num_multiprocessors,
    padded,
)
from moonpool.kernels.triton.merge import (
    MIN_PARTITION_TOKENS,
    PARTS_PER_STEP,
    merge_partitions,
    partition_contexts,
)


# Values and addresses that change from step to step are not specialized, so that nothing compiles while
# serving.
@triton.jit(
    do_not_specialize=["table_stride", "batch", "wanted", "window"],
    do_not_specialize_on_alignment=["table", "contexts", "positions", "lse", "scratch_lse"],
)
def decode_partition(
    q, pool, table, contexts, positions, out, lse, scratch, scratch_lse, layer_offset, block_stride,
    kv_stride, head_stride, table_stride, batch, wanted, scale, v_scale, window, soft_cap,
    QUERIES: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, MIN_TILES: tl.constexpr,
    BATCH_PADDED: tl.constexpr, POSITIONS: tl.constexpr, CAPPED: tl.constexpr, WRITE_LSE: tl.constexpr,
    FP8: tl.constexpr, REST: tl.constexpr, REST_PADDED: tl.constexpr,
):  # fmt: skip
    """One partition of one sequence's context, for all its queries and the query heads of one kv head.

    Grid: (num_kv_heads, batch + wanted). q, out: [batch, QUERIES, num_heads, DIM]; lse: float32 [batch,
    QUERIES, num_heads]; positions: int32 [batch], of the first query, read only with POSITIONS. The result of
    a sequence with one partition goes to out; others go to scratch: float32 [programs, num_kv_heads, QUERIES
    * GROUP, DIM], and scratch_lse: [programs, num_kv_heads, QUERIES * GROUP]. Before the DIM elements of a
    head are REST ones that only scores use.
    """
    WIDTH: tl.constexpr = DIM + REST
    head, program = tl.program_id(0), tl.program_id(1)
    first_tile, partitions, partition_ends, tiles_per_partition = partition_contexts(
        contexts, positions, batch, wanted, window, QUERIES, TILE, MIN_TILES, BATCH_PADDED, POSITIONS
    )
    sequence = tl.sum((partition_ends <= program).to(tl.int32), 0)
    if sequence >= batch:
        return
    mine = tl.arange(0, BATCH_PADDED) == sequence
    num_partitions = tl.sum(tl.where(mine, partitions, 0), 0)
    partition = program - tl.sum(tl.where(mine, partition_ends - partitions, 0), 0)
    context = tl.load(contexts + sequence)
    position = context - QUERIES
    if POSITIONS:
        position = tl.load(positions + sequence)
    first = tl.where(window > 0, tl.maximum(position - window + 1, 0), 0)
    begin = (tl.sum(tl.where(mine, first_tile, 0), 0) + partition * tiles_per_partition) * TILE
    end = tl.minimum(begin + tiles_per_partition * TILE, tl.minimum(context, position + QUERIES))

    num_heads = tl.num_programs(0) * GROUP
    row = tl.arange(0, ROWS)
    dims = tl.arange(0, DIM_PADDED)
    row_there = row < QUERIES * GROUP
    valid = row_there[:, None] & (dims < DIM)[None, :]
    row_position = position + row // GROUP
    row_first = tl.where(window > 0, row_position - window + 1, 0)
    at = (sequence * QUERIES + row // GROUP).to(tl.int64) * num_heads + head * GROUP + row % GROUP
    query = tl.load(q + at[:, None] * WIDTH + REST + dims[None, :], mask=valid, other=0.0)
    rests = tl.arange(0, REST_PADDED)
    query_rest = query
    if REST > 0:
        with_rest = row_there[:, None] & (rests < REST)[None, :]
        query_rest = tl.load(q + at[:, None] * WIDTH + rests[None, :], mask=with_rest, other=0.0)
    pool += layer_offset + head.to(tl.int64) * head_stride
    table += sequence.to(tl.int64) * table_stride

    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    gathered = tl.zeros([ROWS, DIM_PADDED if FP8 == 0 else DIM_PADDED // 2], tl.float32)
    pairs = tl.arange(0, DIM_PADDED // 2)
    odd = tl.zeros([ROWS, DIM_PADDED // 2], tl.float32)  # of float8; gathered has the even columns then
    # Converts scores to exponents of two.
    unit = 1.4426950408889634 if CAPPED else scale * 1.4426950408889634
    for start in range(begin, end, TILE):
        token = start + tl.arange(0, TILE)
        exists = (token >= first) & (token < end)
        if BLOCK_SIZE % TILE == 0:
            # Tiles are aligned, so that each lies in one block.
            offset = tl.load(table + start // BLOCK_SIZE).to(tl.int64) * block_stride
            offset += ((start % BLOCK_SIZE) + tl.arange(0, TILE)) * WIDTH
        else:
            block = tl.load(table + token // BLOCK_SIZE, mask=exists, other=0)
            offset = block.to(tl.int64) * block_stride + (token % BLOCK_SIZE) * WIDTH
        readable = exists[:, None] & (dims < DIM)[None, :]
        stored = tl.load(pool + offset[:, None] + REST + dims[None, :], mask=readable, other=0)
        k = widened(stored, q.dtype.element_ty, FP8)
        scores = tl.dot(query, tl.trans(k), input_precision="tf32x3")
        if REST > 0:
            there = exists[:, None] & (rests < REST)[None, :]
            stored = tl.load(pool + offset[:, None] + rests[None, :], mask=there, other=0)
            k = widened(stored, q.dtype.element_ty, FP8)
            scores += tl.dot(query_rest, tl.trans(k), input_precision="tf32x3")
        if CAPPED:
            scores *= scale
            # tanh through exp2: exact at both ends.
            scores = soft_cap * (1 - 2 / (tl.exp2(scores * (2 * 1.4426950408889634 / soft_cap)) + 1))
        seen = exists[None, :]
        if QUERIES > 1:
            seen = seen & (token[None, :] <= row_position[:, None]) & (token[None, :] >= row_first[:, None])
        scores = tl.where(seen, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1) * unit)
        # A row that has seen no key stays at zero instead of becoming NaN.
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(scores * unit - base[:, None])
        factor = tl.exp2(top - base)
        total = total * factor + tl.sum(weights, 1)
        if FP8 == 0:
            v = tl.load(pool + kv_stride + offset[:, None] + REST + dims[None, :], mask=readable, other=0)
            gathered = gathered * factor[:, None]
            gathered += tl.dot(weights.to(v.dtype), v, input_precision="tf32x3")
        else:
            # Two bytes at a time: tensor cores read V by columns, and only pairs of bytes can be transposed.
            words = (pool + kv_stride).to(tl.pointer_type(tl.uint16))
            there = exists[:, None] & (pairs < DIM // 2)[None, :]
            both = tl.load(words + ((offset + REST) // 2)[:, None] + pairs[None, :], mask=there, other=0)
            probabilities = weights.to(tl.float16)
            gathered = gathered * factor[:, None] + tl.dot(probabilities, halves_of(both & 0xFF, FP8))
            odd = odd * factor[:, None] + tl.dot(probabilities, halves_of(both >> 8, FP8))
        top = new_top

    if FP8 != 0:
        gathered = tl.interleave(gathered, odd)
    gathered = gathered * (v_scale / tl.where(total == 0, 1.0, total))[:, None]
    log = tl.where(total == 0, float("-inf"), (top + tl.log2(total)) * 0.6931471805599453)
    if num_partitions == 1:
        tl.store(
            out + at[:, None] * WIDTH + REST + dims[None, :], gathered.to(out.dtype.element_ty), mask=valid
        )
        if WRITE_LSE:
            tl.store(lse + at, log, mask=row_there)
    else:
        to = (program * tl.num_programs(0) + head).to(tl.int64) * (QUERIES * GROUP) + row
        tl.store(scratch + to[:, None] * DIM + dims[None, :], gathered, mask=valid)
        tl.store(scratch_lse + to, log, mask=row_there)


def decode_constants(
    *,
    queries: int,
    group: int,
    head_dim: int,
    batch: int,
    choice: DecodeChoice,
    positions: bool = False,
    key_only: int = 0,
) -> dict[str, Any]:
    """Constants of both ``decode_partition`` and ``merge_partitions``."""
    return {
        "QUERIES": queries,
        "GROUP": group,
        "DIM": head_dim - key_only,
        "DIM_PADDED": padded(head_dim - key_only, 16),
        "REST": key_only,
        "TILE": choice.tile,
        "MIN_TILES": max(1, MIN_PARTITION_TOKENS // choice.tile),
        "BATCH_PADDED": padded(batch, 256),  # one value for all usual batch sizes
        "POSITIONS": positions,
    }


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
    q_positions: Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    key_only: int = 0,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    num_programs: int | None = None,
) -> Tensor:
    """As ``reference.paged_decode_attention``; ``num_programs`` overrides the number of partitions."""
    batch, num_heads, head_dim = q.shape[0], q.shape[-2], q.shape[-1]
    queries = 1 if q.dim() == 3 else q.shape[1]
    num_kv_heads, block_size = pool.shape[3], pool.shape[4]
    strides = pool.stride()
    if key_only and num_kv_heads == 1:
        num_kv_heads, strides = heads_of_latents(num_heads, queries), (*strides[:3], 0)
    group = num_heads // num_kv_heads
    out = torch.empty_like(q) if out is None else out
    if batch == 0:
        return out
    arch, rows = architecture(q.device), padded(queries * group, 16)
    choice = decode_choice(head_dim, rows, q.dtype, pool.dtype, arch)
    if num_programs is None:
        num_programs = choice.programs_per_multiprocessor * num_multiprocessors(q.device)
    longest = block_table.shape[1] * block_size
    # As many partitions as fill the device, unless no context is long enough to be split.
    wanted = -(-num_programs // num_kv_heads) if longest > max(MIN_PARTITION_TOKENS, choice.tile) else 1
    splits = wanted > 1
    num_partitions = batch + wanted
    shape = (num_partitions, num_kv_heads, queries * group) if splits else (1,)
    scratch = torch.empty((*shape, head_dim - key_only), dtype=torch.float32, device=q.device)
    scratch_lse = torch.empty(shape, dtype=torch.float32, device=q.device)
    constants = decode_constants(
        queries=queries, group=group, head_dim=head_dim, batch=batch, choice=choice,
        positions=q_positions is not None, key_only=key_only,
    )  # fmt: skip
    positions = context_lens if q_positions is None else q_positions
    lse_out = scratch_lse if lse is None else lse
    decode_partition[(num_kv_heads, num_partitions)](
        q, as_bytes(pool), block_table, context_lens, positions, out, lse_out, scratch, scratch_lse,
        layer * strides[1], strides[0], strides[2], strides[3], block_table.stride(0), batch, wanted,
        scale * k_scale, v_scale, window, soft_cap,
        **constants, ROWS=rows, BLOCK_SIZE=block_size, CAPPED=soft_cap > 0, WRITE_LSE=lse is not None,
        FP8=fp8_mode(pool.dtype, arch, not q.is_cuda), num_warps=choice.num_warps,
        num_stages=choice.num_stages, REST_PADDED=padded(key_only, 16) if key_only else 1,
    )  # fmt: skip
    if splits:
        merge_partitions[(batch, queries * num_heads)](
            scratch, scratch_lse, context_lens, positions, out, lse_out, batch, wanted, window,
            KV_HEADS=num_kv_heads, **constants, WRITE_LSE=lse is not None, PARTS_PER_STEP=PARTS_PER_STEP,
            num_warps=4,
        )  # fmt: skip
    return out
