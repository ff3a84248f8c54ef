"""An adapter's rows in blocks of the KV pool, one after the other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class PackedAdapter:
    """One process's part of an adapter, as a load copies it into blocks.

    num_blocks: of the pool, the most that any process of the group needs. image: [blocks, values], this
    process's blocks. lines: int32 [modules, rank, 2], where the rows of A and B begin in the image, in lines.
    ranks: int32 [modules]; 0: the adapter does not change the module.
    """

    path: Path
    digest: str
    rank: int
    num_blocks: int
    image: Tensor
    lines: Lines
    ranks: Lines


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
        self._parts = {
            module: _both(slices(f"{module}.weight"))
            for module in whole
            if int(module.split(".")[2]) in shard.layers
        }
        # By module in the order of ``PackedAdapter.lines``: outputs and inputs.
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

    def num_blocks(self, adapter: PeftAdapter) -> int:
        """Return how many blocks the adapter takes here. Raises AdapterRefused: a row is longer than one."""
        longest = max((self._num_lines(width) for sizes in self.sizes.values() for width in sizes), default=0)
        if longest > self.lines_a_block:
            raise AdapterRefused(
                adapter.path,
                f"a row of its matrices has {longest * LINE_NBYTES:,} bytes, a block of the KV pool "
                f"{self._block_nbytes:,}: raise engine.block_size",
            )
        return -(-self._places(adapter)[1] // self.lines_a_block)

    def pack(self, adapter: PeftAdapter, num_blocks: int) -> PackedAdapter:
        """num_blocks: see ``PackedAdapter``. Raises as ``num_blocks``."""
        places, _ = self._places(adapter)
        rows = torch.zeros(
            (self.num_blocks(adapter) * self.lines_a_block, self.values_a_line), dtype=self.dtype
        )
        lines = np.zeros((len(self.sizes), adapter.rank, 2), np.int32)
        ranks = np.zeros(len(self.sizes), np.int32)
        for number, (module, (outs, ins)) in enumerate(self._parts.items()):
            if (factors := adapter.factors.get(module)) is None:
                continue
            ranks[number] = rank = len(factors.a)
            for side, part in enumerate((factors.a[:, ins], factors.b[:, outs])):
                begins = lines[number, :rank, side] = places[module, side]
                num_lines = self._num_lines(part.shape[1])
                padded = torch.zeros((rank, num_lines * self.values_a_line), dtype=self.dtype)
                padded[:, : part.shape[1]] = part
                where = torch.from_numpy(begins[:, None] + np.arange(num_lines)).view(-1)
                rows[where] = padded.view(-1, self.values_a_line)
        image = rows.view(-1, self.lines_a_block * self.values_a_line)
        return PackedAdapter(adapter.path, adapter.digest, adapter.rank, num_blocks, image, lines, ranks)

    def _num_lines(self, width: int) -> int:
        return -(-width // self.values_a_line)

    def _places(self, adapter: PeftAdapter) -> tuple[Mapping[tuple[str, int], npt.NDArray[np.int64]], int]:
        """Return the first lines of all rows of A (0) and B (1) by module, and the end of the last one."""
        places: dict[tuple[str, int], npt.NDArray[np.int64]] = {}
        end = 0
        for module, (outs, ins) in self.sizes.items():
            if (factors := adapter.factors.get(module)) is not None:
                for side, width in enumerate((ins, outs)):
                    begins = places[module, side] = self._run(end, len(factors.a), self._num_lines(width))
                    end = int(begins[-1]) + self._num_lines(width)
        return places, end

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
