"""The tensors of one step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(slots=True)
class ChunkKeys:
    """Some of what each of the prompt chunks attends to."""

    table: Tensor  # int32 [num_chunks, max_blocks], padded with -1
    lens: Tensor  # int32 [num_chunks]: keys in them
    first: Tensor  # int32 [num_chunks]: where among them the chunk's first token stands; of lens, behind all

    def to(self, device: torch.device) -> ChunkKeys:
        return ChunkKeys(self.table.to(device), self.lens.to(device), self.first.to(device))


@dataclass(slots=True)
class RemoteTokens:
    """Tokens of the same step that another share computes, whose KV this rank keeps too."""

    share: int
    positions: Tensor  # int64 [n]
    slots: Tensor  # int64 [n]
    keys: ChunkKeys | None  # of them, where our chunks attend to any

    def to(self, device: torch.device) -> RemoteTokens:
        keys = None if self.keys is None else self.keys.to(device)
        return RemoteTokens(self.share, self.positions.to(device), self.slots.to(device), keys)


@dataclass(slots=True)
class StepInputs:
    """The tensors of one step: the tokens of num_decodes sequences, then those of the prompt chunks.

    Where a step's tokens are shared out they are one share's; ``others`` are the other shares', whose keys
    are not among ``own_keys``.
    """

    token_ids: Tensor  # int64 [num_tokens]
    positions: Tensor  # int64 [num_tokens]
    slots: Tensor  # int64 [num_tokens]: block * block_size + offset
    num_decodes: int
    decode_table: Tensor  # int32 [num_decodes, max_blocks], padded with -1
    decode_lens: Tensor  # int32 [num_decodes], the new token included
    chunk_table: Tensor | None = None  # int32 [num_chunks, max_blocks]
    chunk_starts: Tensor | None = None  # int32 [num_chunks + 1], cumulative new tokens
    chunk_lens: Tensor | None = None  # int32 [num_chunks], cached and new tokens
    own_keys: ChunkKeys | None = None
    others: tuple[RemoteTokens, ...] = ()
    share_sizes: tuple[int, ...] = ()  # tokens of each share, this one's too

    def to(self, device: torch.device) -> StepInputs:
        """Themselves where they are there."""
        if self.token_ids.device == device:
            return self

        def moved(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.to(device)

        return StepInputs(
            self.token_ids.to(device),
            self.positions.to(device),
            self.slots.to(device),
            self.num_decodes,
            self.decode_table.to(device),
            self.decode_lens.to(device),
            moved(self.chunk_table),
            moved(self.chunk_starts),
            moved(self.chunk_lens),
            None if self.own_keys is None else self.own_keys.to(device),
            tuple(other.to(device) for other in self.others),
            self.share_sizes,
        )
