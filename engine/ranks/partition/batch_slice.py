"""Parts of a step's batch: slices of decodes and prompt tokens, and micro-batches of a pipeline."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch

from moonpool.engine.model.inputs import StepInputs


@dataclass(frozen=True, slots=True)
class TokenRange:
    """Prompt tokens first … end - 1 of the batch (not counting decodes), all of one chunk."""

    chunk: int
    first: int
    end: int

    def __len__(self) -> int:
        return self.end - self.first


def chunk_offsets(inputs: StepInputs) -> list[int]:
    """Return for each chunk: position in the sequence minus index among the batch's prompt tokens."""
    if inputs.chunk_starts is None or inputs.chunk_lens is None:
        return []
    return (inputs.chunk_lens - inputs.chunk_starts[1:]).tolist()


@dataclass(frozen=True, slots=True)
class BatchSlice:
    """Some decodes and prompt tokens of a batch. No range is empty; those of a chunk are in order."""

    decodes: range
    runs: tuple[TokenRange, ...] = ()

    def __len__(self) -> int:
        return len(self.decodes) + sum(map(len, self.runs))

    def rows(self, num_decodes: int) -> npt.NDArray[np.int64]:
        """Return the batch's token indices of the slice, in its order."""
        spans = [self.decodes, *(range(num_decodes + run.first, num_decodes + run.end) for run in self.runs)]
        return np.concatenate([np.arange(span.start, span.stop) for span in spans])

    def select(self, inputs: StepInputs) -> StepInputs:
        """Return the inputs for these tokens, a chunk for each range. A chunk attends to all of its sequence
        before it."""
        if len(self) == len(inputs.token_ids):
            return inputs
        device = inputs.token_ids.device
        rows = torch.from_numpy(self.rows(inputs.num_decodes)).to(device)
        decodes = slice(self.decodes.start, self.decodes.stop)
        part = StepInputs(
            token_ids=inputs.token_ids[rows],
            positions=inputs.positions[rows],
            slots=inputs.slots[rows],
            num_decodes=len(self.decodes),
            decode_table=inputs.decode_table[decodes],
            decode_lens=inputs.decode_lens[decodes],
            max_chunk_tokens=inputs.max_chunk_tokens,
            adapter_ids=None if inputs.adapter_ids is None else inputs.adapter_ids[rows],
            adapters=inputs.adapters,
        )
        if not self.runs:
            return part
        assert inputs.chunk_table is not None
        assert inputs.chunk_starts is not None
        assert inputs.chunk_lens is not None
        offsets = chunk_offsets(inputs)
        starts = np.cumsum([0, *map(len, self.runs)], dtype=np.int32)
        cached_and_new = [offsets[run.chunk] + run.end for run in self.runs]
        part.chunk_table = inputs.chunk_table[[run.chunk for run in self.runs]]
        part.chunk_starts = torch.from_numpy(starts).to(device)
        part.chunk_lens = torch.tensor(cached_and_new, dtype=torch.int32, device=device)
        return part


def micro_batches(inputs: StepInputs, decode_parts: int, max_tokens: int) -> list[BatchSlice]:
    """Split the batch in order: decodes into ``decode_parts``, prompts into at most ``max_tokens`` each; 0:
    nothing is split.

    A long chunk is split, too: a micro-batch reads the KV that those before it wrote.
    """
    n = inputs.num_decodes
    starts = [] if inputs.chunk_starts is None else inputs.chunk_starts.tolist()
    if not max_tokens:
        return [BatchSlice(range(n), _runs(starts, range(starts[-1] if starts else 0)))]
    ends = [n * i // decode_parts for i in range(decode_parts + 1)]
    found = [BatchSlice(range(*each)) for each in pairwise(ends)]
    if starts:
        found += [
            BatchSlice(range(0), _runs(starts, range(first, min(first + max_tokens, starts[-1]))))
            for first in range(0, starts[-1], max_tokens)
        ]
    return [one for one in found if len(one)]


def _runs(starts: list[int], tokens: range) -> tuple[TokenRange, ...]:
    """Return the ranges of ``tokens`` by chunk. starts: cumulative, of the chunks."""
    return tuple(
        TokenRange(chunk, max(first, tokens.start), min(end, tokens.stop))
        for chunk, (first, end) in enumerate(pairwise(starts))
        if max(first, tokens.start) < min(end, tokens.stop)
    )
