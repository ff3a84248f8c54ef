"""An adapter's rows in blocks of the KV pool, one after the other."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from moonpool.engine.adapters.peft import PeftAdapter, targets
from moonpool.engine.checkpoint.config import ModelConfig
from moonpool.engine.errors import AdapterRefused
from moonpool.engine.sharding.parallel_plan import Shard
from moonpool.engine.sharding.tensor_slices import TensorSlices
from moonpool.kernels.reference import LINE_NBYTES

Lines = npt.NDArray[np.int32]
Ranks = npt.NDArray[np.int32]
"""int32 [modules]: the LoRA ranks of all modules of the model, in the order of ``targets``; 0: unchanged."""


def ranks_of(adapter: PeftAdapter, config: ModelConfig) -> Ranks:
    """Where an adapter's rows are follows from this alone."""
    factors = adapter.factors
    return np.array([len(factors[m].a) if m in factors else 0 for m in targets(config)], np.int32)


class AdapterPacking:
    """Which rows of an adapter a process has, and where it packs them.

    Of projections split by outputs it has the whole A and its rows of B, of those split by inputs its columns
    of A and the whole B. A row of either, of one LoRA rank, begins at a line of LINE_NBYTES and never goes
    over the end of a block. The same ranks are packed in the same way everywhere.
    """

    def __init__(self, config: ModelConfig, shard: Shard, dtype: torch.dtype, block_nbytes: int) -> None:
        """dtype: of the rows. block_nbytes: of the shard's part of a block."""
        self.config, self.shard, self.dtype = config, shard, dtype
        self._block_nbytes = block_nbytes
        slices, whole = TensorSlices(config, shard), targets(config)
        own = [int(module.split(".")[2]) in shard.layers for module in whole]
        self._own = np.flatnonzero(own)  # of the model's modules
        self._parts = {
            module: _both(slices(f"{module}.weight"))
            for module, is_own in zip(whole, own, strict=True)
            if is_own
        }
        # By module of this process, in the order of ``places``: outputs and inputs.
        self.sizes = {
            module: (len(range(whole[module][0])[rows]), len(range(whole[module][1])[columns]))
            for module, (rows, columns) in self._parts.items()
        }
        # One line less where blocks do not begin at a line.
        self.lines_a_block = block_nbytes // LINE_NBYTES - (block_nbytes % LINE_NBYTES > 0)
        self.values_a_line = LINE_NBYTES // dtype.itemsize

    def begins(self, block_ids: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """Return the first line of each block of the pool."""
        return -(-np.asarray(block_ids, np.int64) * self._block_nbytes // LINE_NBYTES)

    @property
    def starts_at_lines(self) -> bool:
        """Whether every block begins at a line: its bytes mean the same in any other block."""
        return self._block_nbytes % LINE_NBYTES == 0

    def check(self, path: Path) -> None:
        """Raise AdapterRefused where a row is longer than a block. path: of the adapter."""
        longest = max((self._num_lines(width) for sizes in self.sizes.values() for width in sizes), default=0)
        if longest > self.lines_a_block:
            raise AdapterRefused(
                path,
                f"a row of its matrices has {longest * LINE_NBYTES:,} bytes, a block of the KV pool "
                f"{self._block_nbytes:,}: raise engine.block_size",
            )

    def num_blocks(self, ranks: Ranks) -> int:
        """Return how many blocks an adapter of these ranks takes here."""
        return -(-self.places(ranks)[2] // self.lines_a_block)

    def places(self, ranks: Ranks) -> tuple[Lines, Ranks, int]:
        """Return lines: int32 [modules, rank, 2], where the rows of A and B begin in the adapter's blocks;
        the ranks of these modules, those of this process; and the line after the last row."""
        own = ranks[self._own]
        lines = np.zeros((len(own), int(ranks.max(initial=0)), 2), np.int32)
        end = 0
        for number, ((outs, ins), rank) in enumerate(zip(self.sizes.values(), own.tolist(), strict=True)):
            if not rank:
                continue
            for side, width in enumerate((ins, outs)):
                lines[number, :rank, side] = begins = self._run(end, rank, self._num_lines(width))
                end = int(begins[-1]) + self._num_lines(width)
        return lines, own, end

    def pack(self, adapter: PeftAdapter) -> Tensor:
        """Return [blocks, values]: this process's blocks. Raises as ``check``."""
        self.check(adapter.path)
        lines, ranks, end = self.places(ranks_of(adapter, self.config))
        num_blocks = -(-end // self.lines_a_block)
        rows = torch.zeros((num_blocks * self.lines_a_block, self.values_a_line), dtype=self.dtype)
        for number, (module, (outs, ins)) in enumerate(self._parts.items()):
            if not (rank := int(ranks[number])):
                continue
            factors = adapter.factors[module]
            for side, part in enumerate((factors.a[:, ins], factors.b[:, outs])):
                num_lines = self._num_lines(part.shape[1])
                padded = torch.zeros((rank, num_lines * self.values_a_line), dtype=self.dtype)
                padded[:, : part.shape[1]] = part
                where = torch.from_numpy(lines[number, :rank, side, None] + np.arange(num_lines)).view(-1)
                rows[where] = padded.view(-1, self.values_a_line)
        return rows.view(-1, self.lines_a_block * self.values_a_line)

    def _num_lines(self, width: int) -> int:
        return -(-width // self.values_a_line)

    def _run(self, end: int, count: int, num_lines: int) -> npt.NDArray[np.int64]:
        """Return the first lines of ``count`` rows after ``end``, each within a block."""
        block, used = divmod(end, self.lines_a_block)
        numbers = np.arange(count)
        here = (self.lines_a_block - used) // num_lines
        blocks, places = np.divmod(numbers - here, self.lines_a_block // num_lines)
        after = (block + 1 + blocks) * self.lines_a_block + places * num_lines
        return np.where(numbers < here, end + numbers * num_lines, after)


_WHOLE = (slice(None), slice(None))


def _both(part: tuple[slice, ...]) -> tuple[slice, slice]:
    """The slices of a matrix's rows and columns; those that are not cut are whole."""
    rows, columns = (*part, *_WHOLE)[:2]
    return rows, columns
