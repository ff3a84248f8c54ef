"""Context parallelism: ranks with the same weights and KV compute different tokens of a step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from moonpool.engine.collectives.link import Link
from moonpool.engine.model.inputs import RemoteTokens, StepInputs
from moonpool.engine.ranks.partition.batch_slice import BatchSlice, TokenRange, chunk_offsets
from moonpool.engine.ranks.partition.context_keys import chunk_keys


def split_tokens(
    batch: BatchSlice, cp_size: int, offsets: Sequence[int], block_size: int
) -> list[BatchSlice]:
    """Split ``batch`` evenly by tokens and by attended keys, a slice for each cp rank. If a slice would be
    empty, every rank gets the whole batch.

    Later tokens of a prompt attend to more keys. So a range is split into 2 × cp_size parts, and a rank gets
    one part from the front and the part as far from the end. Splits are between blocks: a block's new keys
    are all on one rank. Larger pairs go to the ranks with fewer tokens.

    offsets: see ``chunk_offsets``.
    """
    n, first = len(batch.decodes), batch.decodes.start
    decodes = [range(first + n * i // cp_size, first + n * (i + 1) // cp_size) for i in range(cp_size)]
    ranges: list[list[TokenRange]] = [[] for _ in decodes]
    num_tokens = [len(some) for some in decodes]
    for tokens in batch.runs:
        pairs = _pairs(tokens, cp_size, offsets[tokens.chunk], block_size)
        pairs.sort(key=lambda pair: -sum(map(len, pair)))
        least_loaded = sorted(range(cp_size), key=num_tokens.__getitem__)
        for cp_rank, pair in zip(least_loaded, pairs, strict=True):
            ranges[cp_rank] += [part for part in pair if len(part)]
            num_tokens[cp_rank] += sum(map(len, pair))
    if not all(num_tokens):
        return [batch] * cp_size
    return [BatchSlice(some, tuple(own)) for some, own in zip(decodes, ranges, strict=True)]


def _pairs(
    tokens: TokenRange, cp_size: int, offset: int, block_size: int
) -> list[tuple[TokenRange, TokenRange]]:
    """Split the range into 2 × cp_size parts; pair i is part i from the front and part i from the end."""
    num_parts = 2 * cp_size
    borders = [tokens.first]
    for i in range(1, num_parts):
        position = offset + tokens.first + len(tokens) * i // num_parts
        border = (position + block_size // 2) // block_size * block_size - offset
        borders.append(min(max(border, tokens.first), tokens.end))
    borders.append(tokens.end)
    parts = [TokenRange(tokens.chunk, borders[i], borders[i + 1]) for i in range(num_parts)]
    return [(parts[i], parts[-1 - i]) for i in range(cp_size)]


class ContextStep:
    """One step on one cp rank: which cp rank computes which tokens of each micro-batch.

    Every cp rank computes all tokens of small micro-batches.
    """

    def __init__(
        self, inputs: StepInputs, cp_rank: int, cp_size: int, *, block_size: int, min_tokens: int
    ) -> None:
        """min_tokens: of a micro-batch that is split."""
        self._inputs = inputs
        self._cp_rank = cp_rank
        self._cp_size = cp_size
        self._block_size = block_size
        self._min_tokens = min_tokens
        self._rows: list[list[npt.NDArray[np.int64]]] = [[] for _ in range(cp_size)]
        self._any_split = False
        self._offsets = chunk_offsets(inputs) if cp_size > 1 else []

    def inputs_for(self, micro_batch: BatchSlice) -> StepInputs:
        """Return this rank's inputs of the step's next micro-batch."""
        inputs, cp_size, cp_rank = self._inputs, self._cp_size, self._cp_rank
        if cp_size == 1:
            return micro_batch.select(inputs)
        slices = [micro_batch] * cp_size
        if len(micro_batch) >= self._min_tokens:
            slices = split_tokens(micro_batch, cp_size, self._offsets, self._block_size)
        rows = [one.rows(inputs.num_decodes) for one in slices]
        for all_rows, more in zip(self._rows, rows, strict=True):
            all_rows.append(more)
        part = slices[cp_rank].select(inputs)
        if slices[0] == slices[-1]:
            return part
        self._any_split = True
        keys = chunk_keys(micro_batch, slices, cp_rank, inputs, self._offsets, self._block_size)
        others = []
        for other in ((cp_rank - i) % cp_size for i in range(1, cp_size)):
            where = torch.from_numpy(rows[other]).to(inputs.positions.device)
            others.append(RemoteTokens(other, inputs.positions[where], inputs.slots[where], keys[other]))
        part.own_keys, part.others = keys[cp_rank], tuple(others)
        part.cp_token_counts = tuple(map(len, slices))
        return part

    def gather_rows(self, hidden: Tensor, rows: Tensor, link: Link) -> Tensor:
        """Return the step's ``rows``, [len(rows), hidden], at least on cp rank 0. All cp ranks call it.

        hidden: [tokens of this cp rank, hidden], of all micro-batches so far.
        """
        if not self._any_split:
            return hidden[rows.to(hidden.device)]
        owner, index = self._owners(rows.numpy())
        if not owner.any():
            # cp rank 0 has them all, and only cp rank 0 makes logits.
            return hidden[torch.from_numpy(index).to(hidden.device)] if self._cp_rank == 0 else hidden[:0]
        counts = np.bincount(owner, minlength=self._cp_size).tolist()
        own = hidden[torch.from_numpy(index[owner == self._cp_rank]).to(hidden.device)]
        take = link.exchange_cp(own, counts)
        whole = hidden.new_empty((len(rows), hidden.shape[1]))
        for cp_rank in range(self._cp_size):
            found = own if cp_rank == self._cp_rank else take(cp_rank)
            whole[torch.from_numpy(np.flatnonzero(owner == cp_rank)).to(hidden.device)] = found
        return whole

    def _owners(self, wanted: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return for each row the first cp rank that has it, and the row's index there."""
        rows = [np.concatenate(parts) for parts in self._rows]
        num_tokens = 1 + max(int(some.max(initial=-1)) for some in rows)
        owner, index = np.full(num_tokens, -1), np.full(num_tokens, -1)
        for cp_rank in reversed(range(self._cp_size)):
            owner[rows[cp_rank]], index[rows[cp_rank]] = cp_rank, np.arange(len(rows[cp_rank]))
        return owner[wanted], index[wanted]
