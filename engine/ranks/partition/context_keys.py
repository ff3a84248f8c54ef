"""The keys that a step's tokens attend to in the blocks of one cp rank.

Of n cp ranks, block b of the pool is on rank b % n, as block b // n of that rank.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from moonpool.engine.model.inputs import RankKeys

Ints = npt.NDArray[np.integer[Any]]


def rank_slots(slots: Ints, cp_rank: int, cp_size: int, block_size: int) -> Ints:
    """Return the slots on the cp rank; -1: on another one."""
    blocks, offsets = np.divmod(slots, block_size)
    own = (slots >= 0) & (blocks % cp_size == cp_rank)
    return np.where(own, blocks // cp_size * block_size + offsets, -1)


class RankBlocks:
    """The blocks of some sequences that are on one cp rank."""

    def __init__(self, blocks: Ints, cp_rank: int, cp_size: int, block_size: int) -> None:
        """blocks: [num_sequences, max_blocks], -1 where there is none."""
        self._block_size = block_size
        num_sequences, width = blocks.shape
        # With a column after the last block, for the position after its last token.
        self._own = np.zeros((num_sequences, width + 1), bool)
        self._own[:, :width] = (blocks >= 0) & (blocks % cp_size == cp_rank)
        # Of the blocks before each column, those of the rank.
        self._before = np.cumsum(self._own, 1, dtype=np.int64) - self._own
        most = int(self._before[:, -1].max(initial=0))
        self._table = np.full((num_sequences, max(most, 1)), -1, np.int32)
        sequence, column = np.nonzero(self._own)
        self._table[sequence, self._before[sequence, column]] = blocks[sequence, column] // cp_size

    def _num_before(self, sequences: Ints, positions: Ints) -> Ints:
        """Return how many keys of the rank are before these positions."""
        columns, offsets = np.divmod(positions, self._block_size)
        own = self._own[sequences, columns]
        counts: Ints = self._before[sequences, columns] * self._block_size + own * offsets
        return counts

    def single(self, sequences: Ints, positions: Ints) -> RankKeys:
        """Return the keys up to the positions, of queries each for itself."""
        lens = self._num_before(sequences, positions + 1)
        return _keys(self._table[sequences], lens, np.maximum(lens - 1, 0), None)

    def runs(self, sequences: Ints, positions: Ints) -> RankKeys:
        """Return the keys up to the positions, for queries of which those of a sequence are in order and
        without gaps.

        In a run the queries whose own keys are here come first, each of which sees one key more than the one
        before. The others see all keys of the run.
        """
        own = self._own[sequences, positions // self._block_size]
        begins = np.ones(len(own), bool)
        begins[1:] = (own[1:] & ~own[:-1]) | (sequences[1:] != sequences[:-1])
        (starts,) = np.nonzero(begins)
        ends = np.append(starts[1:], len(own))
        seen = self._num_before(sequences, positions + 1)
        lens = seen[ends - 1]
        first = np.where(own[starts], seen[starts] - 1, lens)
        return _keys(self._table[sequences[starts]], lens, first, np.append(starts, len(own)))

    def windows(self, sequences: Ints, positions: Ints, window: int) -> RankKeys:
        """Return the keys in the window that ends at each position, of queries each for itself. A window
        begins at other keys of the rank for each query, so that no run of them is regular."""
        low = np.maximum(positions - window + 1, 0)
        columns, offsets = np.divmod(low, self._block_size)
        passed = self._before[sequences, columns]
        lens = self._num_before(sequences, positions + 1) - passed * self._block_size
        width = max(-(-int(lens.max(initial=0)) // self._block_size), 1)
        at = np.minimum(passed[:, None] + np.arange(width), self._table.shape[1] - 1)
        # The kernel hides keys up to ``first - window``, and there are at most ``window`` after them.
        first = self._own[sequences, columns] * offsets + window - 1
        return _keys(self._table[sequences[:, None], at], lens, first, None)


def _keys(table: Ints, lens: Ints, first: Ints, starts: Ints | None) -> RankKeys:
    def on_host(values: Ints) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values, np.int32))

    num_queries = len(lens) if starts is None else int(starts[-1])
    begins = None if starts is None else on_host(starts)
    return RankKeys(on_host(table), on_host(lens), on_host(first), begins, num_queries)
