"""Context parallelism: ranks with the same weights have different blocks, and compute different tokens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from moonpool.engine.collectives.link import Link
from moonpool.engine.model.inputs import ContextPart, RankKeys, StepInputs, moved
from moonpool.engine.ranks.partition.batch_slice import BatchSlice
from moonpool.engine.ranks.partition.context_keys import Ints, RankBlocks, rank_slots
from moonpool.engine.sharding.parallel_plan import run_of


class ContextStep:
    """One step on one cp rank: the tokens of each micro-batch that it computes, and its keys for all tokens.

    Tokens are split evenly: so is attention, which each rank computes for all tokens over its own blocks.
    Every cp rank computes all tokens of small micro-batches.
    """

    def __init__(
        self,
        inputs: StepInputs,
        cp_rank: int,
        cp_size: int,
        *,
        block_size: int,
        min_tokens: int,
        windows: Iterable[int],
    ) -> None:
        """min_tokens: of a micro-batch that is split. windows: of the rank's layers."""
        self._inputs = inputs
        self._cp_rank = cp_rank
        self._cp_size = cp_size
        self._block_size = block_size
        self._min_tokens = max(min_tokens, cp_size)
        self._windows = list(windows)
        self._rows: list[list[Ints]] = [[] for _ in range(cp_size)]
        self._any_split = False

    def inputs_for(self, micro_batch: BatchSlice) -> StepInputs:
        """Return this rank's inputs of the step's next micro-batch."""
        whole, cp_size = micro_batch.select(self._inputs), self._cp_size
        if cp_size == 1:
            return whole
        rows, n = micro_batch.rows(self._inputs.num_decodes), len(micro_batch)
        runs = [range(n)] * cp_size
        counts: tuple[int, ...] = ()
        if n >= self._min_tokens:
            runs = [run_of(n, cp_size, cp_rank) for cp_rank in range(cp_size)]
            counts, self._any_split = tuple(map(len, runs)), True
        for all_rows, run in zip(self._rows, runs, strict=True):
            all_rows.append(rows[run.start : run.stop])
        own = slice(runs[self._cp_rank].start, runs[self._cp_rank].stop)
        return replace(
            whole,
            token_ids=whole.token_ids[own],
            positions=whole.positions[own],
            slots=whole.slots[own],
            adapter_ids=None if whole.adapter_ids is None else whole.adapter_ids[own],
            context=moved(self._context(whole, counts), whole.token_ids.device),
        )

    def _context(self, whole: StepInputs, counts: tuple[int, ...]) -> ContextPart:
        where = self._cp_rank, self._cp_size, self._block_size
        slots = torch.from_numpy(rank_slots(whole.slots.cpu().numpy(), *where))
        positions, n = whole.positions.cpu().numpy(), whole.num_decodes
        # (their blocks on this rank, the sequence of each query, its position, whether they form runs)
        groups: list[tuple[RankBlocks, Ints, Ints, bool]] = []
        if n:
            lens = whole.decode_lens.cpu().numpy().astype(np.int64)
            table = whole.decode_table[:, : -(-int(lens.max()) // self._block_size)]
            decodes = RankBlocks(table.cpu().numpy(), *where)
            groups.append((decodes, np.arange(n, dtype=np.int64), lens - 1, False))
        if whole.chunk_table is not None and whole.chunk_starts is not None:
            sizes = whole.chunk_starts.diff().cpu().numpy()
            chunks = np.repeat(np.arange(len(sizes)), sizes)
            groups.append((RankBlocks(whole.chunk_table.cpu().numpy(), *where), chunks, positions[n:], True))

        def keys(window: int) -> Iterator[RankKeys]:
            for blocks, sequences, at, has_runs in groups:
                if 0 < window <= positions.max():
                    yield blocks.windows(sequences, at, window)
                else:  # no position is beyond a window's reach
                    yield blocks.runs(sequences, at) if has_runs else blocks.single(sequences, at)

        by_window = tuple((window, tuple(keys(window))) for window in self._windows)
        return ContextPart(whole.positions, slots, counts, by_window)

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
        whole = hidden.new_empty((len(rows), hidden.shape[1]))
        whole[torch.from_numpy(np.argsort(owner, kind="stable")).to(hidden.device)] = torch.cat(
            link.gather_cp(own, counts)
        )
        return whole

    def _owners(self, wanted: Ints) -> tuple[Ints, Ints]:
        """Return for each row the first cp rank that has it, and the row's index there."""
        rows = [np.concatenate(parts) for parts in self._rows]
        num_tokens = 1 + max(int(some.max(initial=-1)) for some in rows)
        owner, index = np.full(num_tokens, -1), np.full(num_tokens, -1)
        for cp_rank in reversed(range(self._cp_size)):
            owner[rows[cp_rank]], index[rows[cp_rank]] = cp_rank, np.arange(len(rows[cp_rank]))
        return owner[wanted], index[wanted]
