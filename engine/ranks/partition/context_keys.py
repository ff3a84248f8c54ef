"""The keys that a cp rank's prompt chunks attend to, by the cp rank that writes them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch

from moonpool.engine.model.inputs import ChunkKeys, StepInputs
from moonpool.engine.ranks.partition.batch_slice import BatchSlice, TokenRange


def chunk_keys(
    micro_batch: BatchSlice,
    slices: Sequence[BatchSlice],
    cp_rank: int,
    inputs: StepInputs,
    offsets: Sequence[int],
    block_size: int,
) -> list[ChunkKeys | None]:
    """Return, for the chunks of ``cp_rank``, the keys of each cp rank; None where no chunk attends to any.
    Keys that were in the pool before count as its own.

    micro_batch, slices, offsets, block_size: as of ``split_tokens``.
    """
    found: list[ChunkKeys | None] = []
    own_ranges = slices[cp_rank].runs
    for other, portion in enumerate(slices):
        tables: list[list[int]] = []
        lens: list[int] = []
        firsts: list[int] = []
        for own in own_ranges:
            offset = offsets[own.chunk]
            earlier = [run for run in portion.runs if run.chunk == own.chunk and run.first < own.first]
            before = [_blocks(run, offset, block_size) for run in earlier]
            num_keys = first = block_size * sum(map(len, before))
            if other == cp_rank:
                cached = range(_first_block(micro_batch, own.chunk, offset, block_size))
                here = _blocks(own, offset, block_size)
                first += block_size * len(cached) + offset + own.first - block_size * here.start
                num_keys = first + len(own)
                before = [cached, *before, here]
            tables.append(list(chain.from_iterable(before)))
            lens.append(num_keys)
            firsts.append(first)
        chunks = [own.chunk for own in own_ranges]
        found.append(_keys(inputs, chunks, tables, lens, firsts) if any(lens) else None)
    return found


def _blocks(run: TokenRange, offset: int, block_size: int) -> range:
    """Return the blocks of a range in its sequence. Only a chunk's first range begins within a block; the
    cached part of that block belongs to it."""
    return range((offset + run.first) // block_size, -(-(offset + run.end) // block_size))


def _first_block(micro_batch: BatchSlice, chunk: int, offset: int, block_size: int) -> int:
    """Return the first block of the chunk's sequence that the micro-batch writes."""
    first = next(run.first for run in micro_batch.runs if run.chunk == chunk)
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
