"""Partition of the contexts of a batch, computed on the device by each program."""

# Triton is untyped, and its compile-time constants are capitals.
# mypy: disable-error-code="import-untyped,untyped-decorator,no-untyped-def"
# ruff: noqa: N803

from __future__ import annotations

import triton
import triton.language as tl

MIN_PARTITION_TOKENS = 256  # fewer are not worth a program


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
