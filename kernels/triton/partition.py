"""How the contexts of a batch are cut into parts, worked out on the device by each program for itself."""

# Triton has no types to check, and its code has compile-time constants in capitals.
# mypy: disable-error-code="import-untyped,untyped-decorator,no-untyped-def"
# ruff: noqa: N803

from __future__ import annotations

import triton
import triton.language as tl

MIN_PARTITION_TOKENS = 256  # worth a program of their own


@triton.jit
def partition_contexts(
    contexts,
    positions,
    batch,
    wanted,
    window,
    QUERIES: tl.constexpr,
    TILE: tl.constexpr,
    FEWEST: tl.constexpr,
    BATCH_PADDED: tl.constexpr,
    POSITIONS: tl.constexpr,
):
    """How the tiles of all sequences are spread over programs: about ``wanted`` equal parts in all, of FEWEST
    tiles or more, each of one sequence.

    Returns, of each sequence: its first tile, its parts and where these end among all parts (so that its own
    are the last ``parts`` before that); and the tiles of a part. A sequence of which nothing is
    seen has one part. Everything is computed where the lengths are, so that a captured graph can be replayed
    with others, and one long sequence among short ones is spread over the whole device.
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
    tiles_per_part = tl.maximum((tl.sum(tiles, 0) + wanted - 1) // wanted, FEWEST)
    parts = tl.where(there, tl.maximum((tiles + tiles_per_part - 1) // tiles_per_part, 1), 0)
    return first_tile, parts, tl.cumsum(parts, 0), tiles_per_part
