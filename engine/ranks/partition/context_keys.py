"""What a share's prompt tokens attend to, divided by who writes it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch

from moonpool.engine.model.inputs import ChunkKeys, StepInputs
from moonpool.engine.ranks.partition.batch_slice import BatchSlice, TokenRange


def chunk_keys(
    piece: BatchSlice,
    portions: Sequence[BatchSlice],
    share: int,
    inputs: StepInputs,
    offsets: Sequence[int],
    block_size: int,
) -> list[ChunkKeys | None]:
    """For the chunks of ``share``, one for each of its runs, the keys of each share: None where none of them
    attends to any. What was in the pool before the piece counts as its own.

    piece, portions: as ``split_tokens`` takes and gives them, with the same offsets and block_size.
    """
    found: list[ChunkKeys | None] = []
    for other, portion in enumerate(portions):
        tables: list[list[int]] = []
        lens: list[int] = []
        firsts: list[int] = []
        for run in portions[share].runs:
            offset = offsets[run.chunk]
            before = [_blocks(r, offset, block_size) for r in portion.runs if _is_before(r, run)]
            num_keys = first = block_size * sum(map(len, before))
            if other == share:
                cached = range(_first_block(piece, run.chunk, offset, block_size))
                here = _blocks(run, offset, block_size)
                first += block_size * len(cached) + offset + run.first - block_size * here.start
                num_keys = first + len(run)
                before = [cached, *before, here]
            tables.append(list(chain.from_iterable(before)))
            lens.append(num_keys)
            firsts.append(first)
        chunks = [run.chunk for run in portions[share].runs]
        found.append(_keys(inputs, chunks, tables, lens, firsts) if any(lens) else None)
    return found


def _is_before(one: TokenRange, other: TokenRange) -> bool:
    return one.chunk == other.chunk and one.first < other.first


def _blocks(run: TokenRange, offset: int, block_size: int) -> range:
    """Of its sequence. What is cached of the block it begins in goes with it: only the first run of a chunk
    begins within one."""
    return range((offset + run.first) // block_size, -(-(offset + run.end) // block_size))


def _first_block(piece: BatchSlice, chunk: int, offset: int, block_size: int) -> int:
    """The first that the piece writes to of the chunk's sequence."""
    first = next(run.first for run in piece.runs if run.chunk == chunk)
    return (offset + first) // block_size


def _keys(
    inputs: StepInputs, chunks: list[int], tables: list[list[int]], lens: list[int], firsts: list[int]
) -> ChunkKeys:
    """tables: columns of the rows ``chunks`` of the batch's block table."""
    assert inputs.chunk_table is not None
    device = inputs.chunk_table.device
    columns = torch.full((len(tables), max(map(len, tables))), -1)
    for row, table in zip(columns, tables, strict=True):
        row[: len(table)] = torch.tensor(table)
    columns = columns.to(device)
    blocks = inputs.chunk_table[torch.tensor(chunks, device=device)[:, None], columns.clamp(min=0)]
    return ChunkKeys(
        blocks.masked_fill(columns < 0, -1),
        torch.tensor(lens, dtype=torch.int32, device=device),
        torch.tensor(firsts, dtype=torch.int32, device=device),
    )
