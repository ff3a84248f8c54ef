"""A part of a step's batch: some of its decodes, and runs of its prompt tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from moonpool.engine.model.inputs import StepInputs


@dataclass(frozen=True, slots=True)
class TokenRange:
    """Prompt tokens first … end - 1 of the batch (its decodes not counted), all of one chunk."""

    chunk: int
    first: int
    end: int

    def __len__(self) -> int:
        return self.end - self.first


def chunk_offsets(inputs: StepInputs) -> list[int]:
    """Of each chunk: from the number of a prompt token of the batch to its position in its sequence."""
    if inputs.chunk_starts is None or inputs.chunk_lens is None:
        return []
    return (inputs.chunk_lens - inputs.chunk_starts[1:]).tolist()


@dataclass(frozen=True, slots=True)
class BatchSlice:
    """No run is empty. Those of one chunk are in the order of their tokens."""

    decodes: range
    runs: tuple[TokenRange, ...] = ()

    def __len__(self) -> int:
        return len(self.decodes) + sum(map(len, self.runs))

    def rows(self, num_decodes: int) -> npt.NDArray[np.int64]:
        """Which tokens of the batch these are, in the order they have here."""
        spans = [self.decodes, *(range(num_decodes + run.first, num_decodes + run.end) for run in self.runs)]
        return np.concatenate([np.arange(span.start, span.stop) for span in spans])

    def of(self, inputs: StepInputs) -> StepInputs:
        """The batch that computes these tokens, a chunk for each run: it attends to all of its sequence that
        is before it, whoever writes that."""
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
