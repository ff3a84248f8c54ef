"""Partition of contexts over programs, and the merge of attentions over parts of the keys, in Triton."""

# Triton is untyped, and its compile-time constants are capitals.
# mypy: disable-error-code="import-untyped,untyped-decorator,no-untyped-def"
# ruff: noqa: N803

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moonpool.kernels.triton.launch import padded

MIN_PARTITION_TOKENS = 256  # fewer are not worth a program
PARTS_PER_STEP = 32  # parts that a step of a merge reads


@triton.jit
def partition_contexts(
    contexts, positions, batch, wanted, window,
    QUERIES: tl.constexpr, TILE: tl.constexpr, MIN_TILES: tl.constexpr, BATCH_PADDED: tl.constexpr,
    POSITIONS: tl.constexpr,
):  # fmt: skip
    """Split the tiles of all sequences into about ``wanted`` equal partitions of at least MIN_TILES tiles.

    A partition belongs to one sequence. Returns for each sequence: its first tile, the number of its
    partitions and their end among all partitions; and the tiles of a partition. A sequence without visible
    keys has one partition. The lengths are read on the device, so that a captured graph can be replayed with
    others, and one long sequence among short ones is spread over the whole device.
    """
    i = tl.arange(0, BATCH_PADDED)
    there = i < batch
    context = tl.load(contexts + i, mask=there, other=0)
    position = context - QUERIES
    if POSITIONS:
        position = tl.load(positions + i, mask=there, other=0)
    first = tl.where(window > 0, tl.maximum(position - window + 1, 0), 0)
    end = tl.minimum(context, position + QUERIES)
    first_tile = first // TILE
    tiles = tl.where(end > first, (end + TILE - 1) // TILE - first_tile, 0)
    tiles_per_partition = tl.maximum((tl.sum(tiles, 0) + wanted - 1) // wanted, MIN_TILES)
    partitions = tl.where(there, tl.maximum((tiles + tiles_per_partition - 1) // tiles_per_partition, 1), 0)
    return first_tile, partitions, tl.cumsum(partitions, 0), tiles_per_partition


@triton.jit
def softmax_weighted(
    parts, lse, at, step, count, TILE: tl.constexpr, DIM: tl.constexpr, DIM_PADDED: tl.constexpr
):
    """Sum rows at, at + step … of ``count`` parts, weighted by their sums of exponentials, in a fixed order.

    parts: […, DIM]; lse: natural logarithm, -inf where a part saw no key. Returns the row and its lse.
    """
    dims = tl.arange(0, DIM_PADDED)
    top = float("-inf")
    total = 0.0
    gathered = tl.zeros([DIM_PADDED], tl.float32)
    for start in range(0, count, TILE):
        part = start + tl.arange(0, TILE)
        there = part < count
        where = at + part.to(tl.int64) * step
        logs = tl.load(lse + where, mask=there, other=float("-inf"))
        new_top = tl.maximum(top, tl.max(logs, 0))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        unseen = logs == float("-inf")
        weights = tl.where(unseen, 0.0, tl.exp2((logs - base) * 1.4426950408889634))
        readable = (there & ~unseen)[:, None] & (dims < DIM)[None, :]
        values = tl.load(parts + where[:, None] * DIM + dims[None, :], mask=readable, other=0.0)
        factor = tl.exp2((top - base) * 1.4426950408889634)
        total = total * factor + tl.sum(weights, 0)
        gathered = gathered * factor + tl.sum(values.to(tl.float32) * weights[:, None], 0)
        top = new_top
    gathered = gathered / tl.where(total == 0, 1.0, total)
    return gathered, tl.where(total == 0, float("-inf"), top + tl.log2(total) * 0.6931471805599453)


# Values and addresses that change from step to step are not specialized, so that nothing compiles while
# serving.
@triton.jit(
    do_not_specialize=["batch", "wanted", "window"],
    do_not_specialize_on_alignment=["contexts", "positions", "lse", "scratch_lse"],
)
def merge_partitions(
    scratch, scratch_lse, contexts, positions, out, lse, batch, wanted, window,
    KV_HEADS: tl.constexpr, QUERIES: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr, TILE: tl.constexpr, MIN_TILES: tl.constexpr, BATCH_PADDED: tl.constexpr,
    POSITIONS: tl.constexpr, REST: tl.constexpr, WRITE_LSE: tl.constexpr, PARTS_PER_STEP: tl.constexpr,
):  # fmt: skip
    """Merge the partitions that ``decode_partition`` wrote to scratch. Grid: (batch, QUERIES * num_heads)."""
    sequence = tl.program_id(0)
    _, partitions, partition_ends, _ = partition_contexts(
        contexts, positions, batch, wanted, window, QUERIES, TILE, MIN_TILES, BATCH_PADDED, POSITIONS
    )
    mine = tl.arange(0, BATCH_PADDED) == sequence
    num_partitions = tl.sum(tl.where(mine, partitions, 0), 0)
    if num_partitions == 1:
        return
    first = tl.sum(tl.where(mine, partition_ends - partitions, 0), 0)
    query, query_head = tl.program_id(1) // (KV_HEADS * GROUP), tl.program_id(1) % (KV_HEADS * GROUP)
    rows: tl.constexpr = QUERIES * GROUP
    at = (first * KV_HEADS + query_head // GROUP).to(tl.int64) * rows + query * GROUP + query_head % GROUP
    row, log = softmax_weighted(
        scratch, scratch_lse, at, KV_HEADS * rows, num_partitions, PARTS_PER_STEP, DIM, DIM_PADDED
    )
    to = sequence.to(tl.int64) * (QUERIES * KV_HEADS * GROUP) + tl.program_id(1)
    dims = tl.arange(0, DIM_PADDED)
    tl.store(out + to * (DIM + REST) + REST + dims, row.to(out.dtype.element_ty), mask=dims < DIM)
    if WRITE_LSE:
        tl.store(lse + to, log)


@triton.jit(do_not_specialize=["num_rows", "num_parts"], do_not_specialize_on_alignment=["lses", "lse"])
def merge_states(
    outs, lses, out, lse, num_rows, num_parts,
    DIM: tl.constexpr, DIM_PADDED: tl.constexpr, PARTS_PER_STEP: tl.constexpr,
):  # fmt: skip
    """Grid: (num_rows,). outs: [num_parts, num_rows, DIM]; lses: [num_parts, num_rows]."""
    at = tl.program_id(0).to(tl.int64)
    row, log = softmax_weighted(outs, lses, at, num_rows, num_parts, PARTS_PER_STEP, DIM, DIM_PADDED)
    dims = tl.arange(0, DIM_PADDED)
    tl.store(out + at * DIM + dims, row.to(out.dtype.element_ty), mask=dims < DIM)
    tl.store(lse + at, log)


def merge_attention_states(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """As ``reference.merge_attention_states``."""
    out, lse = torch.empty_like(outs[0]), torch.empty_like(lses[0])
    num_rows, head_dim = lse.numel(), outs.shape[-1]
    if num_rows:
        merge_states[(num_rows,)](
            outs, lses, out, lse, num_rows, outs.shape[0],
            DIM=head_dim, DIM_PADDED=padded(head_dim, 16), PARTS_PER_STEP=PARTS_PER_STEP, num_warps=4,
        )  # fmt: skip
    return out, lse
