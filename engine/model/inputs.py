"""The tensors of one step."""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(slots=True)
class ChunkKeys:
    """Some of the keys that each prompt chunk attends to."""

    table: Tensor  # int32 [num_chunks, max_blocks], padded with -1
    lens: Tensor  # int32 [num_chunks]: number of keys
    first: Tensor  # int32 [num_chunks]: position of the chunk's first token among the keys; lens: after all


@dataclass(slots=True)
class RemoteTokens:
    """Tokens of the same step that another cp rank computes. This rank writes their KV, too."""

    cp_rank: int
    positions: Tensor  # int64 [n]
    slots: Tensor  # int64 [n]
    keys: ChunkKeys | None  # if our chunks attend to any of them


@dataclass(slots=True)
class StepInputs:
    """The tensors of one step: the tokens of num_decodes sequences, then those of the prompt chunks.

    With context parallelism these are the tokens of one cp rank. ``others`` are those of the other cp ranks;
    ``own_keys`` excludes their keys.
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
    own_keys: ChunkKeys | None = None
    others: tuple[RemoteTokens, ...] = ()
    cp_token_counts: tuple[int, ...] = ()  # tokens of each cp rank
    adapter_ids: Tensor | None = None  # int32 [num_tokens], indices of ``adapters``; -1: no adapter
    adapters: tuple[int, ...] = ()  # their numbers, ascending

    def to(self, device: torch.device) -> StepInputs:
        """Return the inputs on ``device``; ``self`` if they are there."""
        if self.token_ids.device == device:
            return self
        moved: StepInputs = _moved(self, device)
        return moved


def _moved(value: Any, device: torch.device) -> Any:
    """Copy tensors to ``device``, also inside tuples and dataclasses."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, tuple):
        return tuple(_moved(item, device) for item in value)
    if is_dataclass(value) and not isinstance(value, type):
        return type(value)(*(_moved(getattr(value, field.name), device) for field in fields(value)))
    return value
