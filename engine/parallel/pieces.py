"""A step's batch in pieces that follow each other through the stages of a pipeline."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.model import StepInputs


@dataclass(slots=True)
class _Piece:
    """Of consecutive tokens of the batch. ``rows``: (chunk, its first token here, its end here)."""

    first: int
    end: int
    rows: list[tuple[int, int, int]]


def cut(inputs: StepInputs, num_stages: int, max_tokens: int) -> list[StepInputs]:
    """The batch in the order of its tokens: decodes in ``num_stages`` parts, prompts in pieces of at most
    ``max_tokens``. A long chunk is cut too: a piece reads what those before it wrote, as chunks do."""
    if num_stages == 1:
        return [inputs]
    n = inputs.num_decodes
    pieces = [
        _decodes(inputs, n * i // num_stages, n * (i + 1) // num_stages)
        for i in range(num_stages)
        if n * i // num_stages < n * (i + 1) // num_stages
    ]
    if inputs.chunk_starts is not None:
        pieces += [_prompts(inputs, piece) for piece in _prompt_pieces(inputs, max_tokens)]
    return pieces


def _decodes(inputs: StepInputs, first: int, end: int) -> StepInputs:
    rows = slice(first, end)
    return StepInputs(
        token_ids=inputs.token_ids[rows],
        positions=inputs.positions[rows],
        slots=inputs.slots[rows],
        num_decodes=end - first,
        decode_table=inputs.decode_table[rows],
        decode_lens=inputs.decode_lens[rows],
    )


def _prompt_pieces(inputs: StepInputs, max_tokens: int) -> list[_Piece]:
    assert inputs.chunk_starts is not None
    starts = inputs.chunk_starts.tolist()
    pieces: list[_Piece] = []
    room = 0
    for chunk in range(len(starts) - 1):
        at, end = starts[chunk], starts[chunk + 1]
        while at < end:
            if room == 0:
                pieces.append(_Piece(at, at, []))
                room = max_tokens
            stop = min(end, at + room)
            pieces[-1].rows.append((chunk, at, stop))
            pieces[-1].end = stop
            room -= stop - at
            at = stop
    return pieces


def _prompts(inputs: StepInputs, piece: _Piece) -> StepInputs:
    assert inputs.chunk_table is not None
    assert inputs.chunk_starts is not None
    assert inputs.chunk_lens is not None
    n, device = inputs.num_decodes, inputs.chunk_starts.device
    tokens = slice(n + piece.first, n + piece.end)
    ends = inputs.chunk_starts[1:].tolist()
    lens = inputs.chunk_lens.tolist()
    starts, cached_and_new = [0], []
    for chunk, first, end in piece.rows:
        starts.append(starts[-1] + end - first)
        cached_and_new.append(lens[chunk] - (ends[chunk] - end))
    return StepInputs(
        token_ids=inputs.token_ids[tokens],
        positions=inputs.positions[tokens],
        slots=inputs.slots[tokens],
        num_decodes=0,
        decode_table=inputs.decode_table[:0],
        decode_lens=inputs.decode_lens[:0],
        chunk_table=inputs.chunk_table[[chunk for chunk, _, _ in piece.rows]],
        chunk_starts=torch.tensor(starts, dtype=torch.int32, device=device),
        chunk_lens=torch.tensor(cached_and_new, dtype=torch.int32, device=device),
    )
