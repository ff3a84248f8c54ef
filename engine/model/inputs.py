"""The tensors of one step."""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(slots=True)
class RankKeys:
    """The keys on one cp rank that runs of queries attend to."""

    table: Tensor  # int32 [num_runs, max_blocks], blocks of the rank in the order of the sequence, then -1
    lens: Tensor  # int32 [num_runs]: number of keys
    first: Tensor  # int32 [num_runs]: position of the run's first query among the keys; lens: after all
    starts: Tensor | None  # int32 [num_runs + 1], cumulative queries; None: a query each
    num_queries: int


@dataclass(slots=True)
class ContextPart:
    """One cp rank's part of a step's context: all tokens of the step, and the keys in this rank's blocks."""

    positions: Tensor  # int64 [all tokens]
    slots: Tensor  # int64 [all tokens], of this rank; -1: the token's block is on another cp rank
    counts: tuple[int, ...]  # tokens that each cp rank computes, in order; empty: every one computes all
    keys: tuple[tuple[int, tuple[RankKeys, ...]], ...]  # by the window of layers, for all tokens in order

    def keys_of(self, window: int) -> tuple[RankKeys, ...]:
        return next(keys for each, keys in self.keys if each == window)


@dataclass(slots=True)
class StepInputs:
    """The tensors of one step: the tokens of num_decodes sequences, then those of the prompt chunks.

    With context parallelism these are the tokens that one cp rank computes; it attends by ``context``.
    """

    token_ids: Tensor  # int64 [num_tokens]
    positions: Tensor  # int64 [num_tokens]
    slots: Tensor  # int64 [num_tokens]: block * block_size + offset
    num_decodes: int
    decode_table: Tensor  # int32 [num_decodes, max_blocks], padded with -1
    decode_lens: Tensor  # int32 [num_decodes], including the new token
    chunk_table: Tensor | None = None  # int32 [num_chunks, max_blocks]
    chunk_starts: Tensor | None = None  # int32 [num_chunks + 1], cumulative new tokens
    chunk_lens: Tensor | None = None  # int32 [num_chunks], cached and new tokens
    max_chunk_tokens: int = 0  # of verified proposals, the most of a sequence; 0: prompts
    context: ContextPart | None = None
    adapter_ids: Tensor | None = None  # int32 [num_tokens], indices of ``adapters``; -1: no adapter
    adapters: tuple[int, ...] = ()  # their numbers, ascending
    # Where full layers have each block of the tables: see ``engine.memory.packing``. None: in the block.
    decode_places: Tensor | None = None  # int32, as decode_table
    chunk_places: Tensor | None = None  # int32, as chunk_table
    moves: Tensor | None = None  # int32 [n, 2], places of blocks that move before the step

    def to(self, device: torch.device) -> StepInputs:
        """Return the inputs on ``device``; ``self`` if they are there."""
        if self.token_ids.device == device:
            return self
        inputs: StepInputs = moved(self, device)
        return inputs


def moved(value: Any, device: torch.device) -> Any:
    """Copy tensors to ``device``, also inside tuples and dataclasses."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, tuple):
        return tuple(moved(item, device) for item in value)
    if is_dataclass(value) and not isinstance(value, type):
        return type(value)(*(moved(getattr(value, field.name), device) for field in fields(value)))
    return value
