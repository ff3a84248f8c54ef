"""The input tensors of a step, kept between steps and updated in place."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from moonpool.engine.batching.sequence import Sequence
from moonpool.engine.batching.step_plan import ENDS, StepPlan
from moonpool.engine.device.device import Device
from moonpool.engine.memory.packing import Packing
from moonpool.engine.model.inputs import StepInputs


@dataclass(frozen=True, slots=True)
class PaddedRows:
    """Decode rows of a step at a fixed address on the device.

    packed: int64 [3, size], token ids, positions and slots; padding has slot -1. lens: int32 [size]; padding
    0.
    """

    packed: Tensor
    lens: Tensor

    @classmethod
    def on(cls, device: torch.device, size: int) -> PaddedRows:
        packed = torch.zeros((3, size), dtype=torch.int64, device=device)
        packed[2] = -1
        return cls(packed, torch.zeros(size, dtype=torch.int32, device=device))

    @property
    def size(self) -> int:
        return len(self.lens)

    def inputs(self, table: Tensor) -> StepInputs:
        """table: int32 [rows, max_blocks], at least ``size`` rows."""
        token_ids, positions, slots = self.packed
        return StepInputs(token_ids, positions, slots, self.size, table[: self.size], self.lens)


class InputBuilder:
    """Builds ``StepInputs`` from the plans of one micro-batch.

    On a CPU the returned tensors are the persistent arrays; on a GPU they are copied, of block tables only
    what changed: rows with a new sequence, and the blocks that others have got. A step with the same decoding
    sequences as the one before costs a few vector operations, independent of the context length.
    """

    def __init__(
        self,
        *,
        max_batch_size: int,
        max_batch_tokens: int,
        max_len: int,
        block_size: int,
        device: Device,
        packing: Packing | None = None,
    ) -> None:
        """``packing``: not on a GPU. With it the inputs have places beside blocks."""
        self._block_size = block_size
        self._shift = block_size.bit_length() - 1
        assert block_size == 1 << self._shift
        self._device = device
        assert packing is None or not device.runs_ahead, "packs are not for steps that run ahead"
        self._packing = packing
        rows = min(max_batch_size, max_batch_tokens)
        max_blocks = -(-max_len // block_size)
        self._tokens = np.zeros(max_batch_tokens, np.int64)
        self._positions = np.zeros(max_batch_tokens, np.int64)
        self._slots = np.zeros(max_batch_tokens, np.int64)
        self._lens = np.zeros(rows, np.int32)
        self._table = np.full((rows, max_blocks), -1, np.int32)
        self._places = self._table.copy() if packing is not None else self._table[:, :0]
        self._row_numbers = np.arange(rows)
        self._rows: list[tuple[Sequence, int]] = []  # their sequences, and when these joined
        self._version = -1
        self._decode_only: StepInputs | None = None  # reused while the batch is the same
        # int32 [rows, max_blocks], where the model reads it. Rows beyond the batch are stale.
        self.table = torch.from_numpy(self._table)
        if device.runs_ahead:
            self.table = device.upload(self.table)

    def prepare(self, plan: StepPlan, sampled: Tensor | None = None) -> StepInputs:
        """Return the tensors of the plan, valid until the next call. ``sampled``: the tokens of the step
        before, on the device, for a plan that was made before they were known."""
        n, same = len(plan.decodes), plan.version == self._version
        self._update(plan, same)
        if not same:
            self._decode_only = None
        if plan.runs:
            return self._with_moves(self._with_adapters(self._with_runs(plan, n), plan), plan)
        if self._decode_only is None or self._device.runs_ahead:
            self._decode_only = self._with_adapters(self._decode_inputs(n, n), plan)
            self._feed(self._decode_only.token_ids, plan, sampled)
        return self._with_moves(self._decode_only, plan)

    def _with_moves(self, inputs: StepInputs, plan: StepPlan) -> StepInputs:
        inputs.moves = None
        if plan.moves:
            inputs.moves = torch.tensor([[move.before, move.after] for move in plan.moves], dtype=torch.int32)
        return inputs

    def _feed(self, token_ids: Tensor, plan: StepPlan, sampled: Tensor | None) -> None:
        """Write the sampled tokens into ``token_ids``, on the device."""
        if plan.after is None or sampled is None:
            return
        n = len(plan.decodes)
        if plan.after == list(range(n)):
            token_ids[:n].copy_(sampled[:n])
            return
        source = self._device.upload(torch.tensor(plan.after))
        newest = sampled.index_select(0, source.clamp(min=0))
        token_ids[:n].copy_(torch.where(source >= 0, newest, token_ids[:n]))

    def prepare_padded(self, plan: StepPlan, rows: PaddedRows, sampled: Tensor | None = None) -> None:
        """Write a plan without chunks into ``rows``, padded to their size. ``sampled``: see ``prepare``."""
        n, size = len(plan.decodes), rows.size
        self._update(plan, plan.version == self._version)
        packed = np.zeros((3, size), np.int64)
        packed[0, :n], packed[1, :n], packed[2, :n] = self._tokens[:n], self._positions[:n], self._slots[:n]
        packed[2, n:] = -1
        lens = np.zeros(size, np.int32)
        lens[:n] = self._lens[:n]
        rows.packed.copy_(self._device.upload(torch.from_numpy(packed)))
        self._feed(rows.packed[0], plan, sampled)
        rows.lens.copy_(self._device.upload(torch.from_numpy(lens)))

    def _update(self, plan: StepPlan, same: bool) -> None:
        """Update tokens, positions, slots, lengths and block tables of the decodes."""
        n = len(plan.decodes)
        rows = [] if same else self._load_rows(plan)
        moved = {(s.row, column): block for s, column, block in plan.moved_blocks if s.row >= 0}
        for (row, column), block in moved.items():
            self._table[row, column] = block
            if self._packing is not None:
                packed = plan.decodes[row].packed
                self._places[row, column] = packed[column] if block < 0 else self._packing.place(block)
        self._fill_decodes(plan, n)
        if not self._device.runs_ahead:
            return
        if rows:
            width = max(len(plan.decodes[row].block_table) for row in rows)
            blocks = self._device.upload(torch.from_numpy(self._table[rows, :width]))
            self.table[:, :width].index_copy_(0, self._device.upload(torch.tensor(rows)), blocks)
        if moved:
            cells = torch.tensor([(*at, block) for at, block in moved.items()]).T.contiguous()
            row, column, block = self._device.upload(cells)
            self.table.index_put_((row, column), block.int())

    def _load_rows(self, plan: StepPlan) -> list[int]:
        """Write the block tables of rows with a new sequence. Return these rows."""
        before, found = self._rows, [(sequence, sequence.joined) for sequence in plan.decodes]
        rows = [i for i, row in enumerate(found) if i >= len(before) or before[i] != row]
        for i in rows:
            blocks = plan.decodes[i].block_table
            self._table[i, : len(blocks)] = blocks
            self._table[i, len(blocks) :] = -1
            if self._packing is not None:
                self._places[i, : len(blocks)] = self._packing.places(blocks, plan.decodes[i].packed)
        self._rows = found
        self._version = plan.version
        return rows

    def _fill_decodes(self, plan: StepPlan, n: int) -> None:
        """Fill in the newest token of each sequence; its KV is not in the pool yet."""
        decodes, lens = plan.decodes, self._lens[:n]
        self._tokens[:n] = [sequence.last_token_id for sequence in decodes]
        lens[:] = [sequence.num_tokens for sequence in decodes]
        after = None if plan.after is None else np.array(plan.after)
        if after is not None:
            lens += after >= 0
        positions = np.subtract(lens, 1, out=self._positions[:n])
        blocks = self._table[self._row_numbers[:n], positions >> self._shift].astype(np.int64)
        np.add(blocks * self._block_size, positions & (self._block_size - 1), out=self._slots[:n])
        if after is not None:
            lens[after == ENDS] = 0
            self._slots[:n][after == ENDS] = -1

    def _width(self, n: int) -> int:
        """Return the number of blocks of the longest of the first ``n`` rows."""
        return int(self._lens[:n].max(initial=1) - 1 >> self._shift) + 1

    def _decode_inputs(self, num_tokens: int, n: int) -> StepInputs:
        if self._device.runs_ahead:
            return self._on_device(num_tokens, n)
        return StepInputs(
            token_ids=torch.from_numpy(self._tokens[:num_tokens]),
            positions=torch.from_numpy(self._positions[:num_tokens]),
            slots=torch.from_numpy(self._slots[:num_tokens]),
            num_decodes=n,
            decode_table=self.table[:n],
            decode_lens=torch.from_numpy(self._lens[:n]),
            decode_places=None if self._packing is None else torch.from_numpy(self._places[:n]),
        )

    def _on_device(self, num_tokens: int, n: int) -> StepInputs:
        packed = np.stack((self._tokens[:num_tokens], self._positions[:num_tokens], self._slots[:num_tokens]))
        token_ids, positions, slots = self._device.upload(torch.from_numpy(packed))
        lens = self._device.upload(torch.from_numpy(self._lens[:n]))
        return StepInputs(token_ids, positions, slots, n, self.table[:n, : self._width(n)], lens)

    def _with_drafts(self, plan: StepPlan, n: int) -> StepInputs:
        """Each sequence's newest token and what is proposed to follow it as one run: to a CPU that is cheaper
        than a decode and a run, and has the bits of plain decoding."""
        proposed = {draft.sequence.row: draft for draft in plan.drafts}
        newest = self._tokens[:n].tolist()
        counts = [1 + (proposed[row].num_tokens if row in proposed else 0) for row in range(n)]
        starts = np.cumsum([0, *counts], dtype=np.int32)
        for row, (first, end) in enumerate(pairwise(starts.tolist())):
            tokens = [newest[row], *(proposed[row].proposed if row in proposed else ())]
            self._fill_run(int(self._lens[row]) - 1, tokens, first, end, self._table[row])
        lens = self._lens[:n] + np.diff(starts) - 1
        inputs = self._decode_inputs(int(starts[-1]), 0)
        inputs.chunk_table = self.table[:n]
        if self._packing is not None:
            inputs.chunk_places = torch.from_numpy(self._places[:n])
        inputs.chunk_starts, inputs.chunk_lens = torch.from_numpy(starts), torch.from_numpy(lens)
        inputs.max_chunk_tokens = max(counts)
        return inputs

    def _with_runs(self, plan: StepPlan, n: int) -> StepInputs:
        if plan.drafts and not plan.chunks and not self._device.runs_ahead:
            return self._with_drafts(plan, n)
        runs = plan.runs
        starts = np.zeros(len(runs) + 1, np.int32)
        lens = np.zeros(len(runs), np.int32)
        width = max(len(run.sequence.block_table) for run in runs)
        table = np.full((len(runs), width), -1, np.int32)
        places = table.copy()
        first = n
        for i, run in enumerate(runs):
            end = first + run.num_tokens
            blocks = run.sequence.block_table
            table[i, : len(blocks)] = blocks
            if self._packing is not None:
                places[i, : len(blocks)] = self._packing.places(blocks, run.sequence.packed)
            self._fill_run(run.start, run.token_ids, first, end, table[i])
            first = end
            starts[i + 1] = end - n
            lens[i] = run.start + run.num_tokens
        inputs = self._decode_inputs(first, n)
        inputs.chunk_table, inputs.chunk_starts, inputs.chunk_lens = (
            self._device.upload(torch.from_numpy(array)) for array in (table, starts, lens)
        )
        if self._packing is not None:
            inputs.chunk_places = torch.from_numpy(places)
        return inputs

    def _with_adapters(self, inputs: StepInputs, plan: StepPlan) -> StepInputs:
        """Add the adapter of each token."""
        if not plan.has_adapters:
            return inputs
        numbers = np.array([sequence.adapter for sequence in plan.sequences()])
        found = np.unique(numbers[numbers >= 0])
        ids = np.where(numbers >= 0, np.searchsorted(found, numbers), -1).astype(np.int32)
        counts = [1] * len(plan.decodes) + [run.num_tokens for run in plan.runs]
        if inputs.max_chunk_tokens:
            assert inputs.chunk_starts is not None
            ids, counts = ids[: len(plan.decodes)], inputs.chunk_starts.diff().tolist()
        inputs.adapter_ids = self._device.upload(torch.from_numpy(np.repeat(ids, counts)))
        inputs.adapters = tuple(found.tolist())
        return inputs

    def _fill_run(
        self,
        start: int,
        token_ids: npt.ArrayLike,
        first: int,
        end: int,
        table_row: npt.NDArray[np.int32],
    ) -> None:
        at = np.arange(start, start + end - first)
        self._tokens[first:end] = token_ids
        self._positions[first:end] = at
        blocks = table_row[at >> self._shift].astype(np.int64)
        self._slots[first:end] = blocks * self._block_size + (at & (self._block_size - 1))
