"""The blocks that are put and got, all of them once a round, in batches."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from moonpool.kvstore.blocks.keys import BlockKey
from moonpool.kvstore.blocks.layout import OpaqueLayout
from moonpool.transfer.memory.allocation import allocate

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Settings:
    """total_nbytes: all blocks of a round. threads: reads and writes of the disk at a time."""

    directory: Path
    block_sizes: tuple[int, ...]
    total_nbytes: int
    threads: int


@dataclass(frozen=True, slots=True)
class Shape:
    block_nbytes: int
    num_blocks: int
    batch: int

    @classmethod
    def of(cls, block_nbytes: int, total_nbytes: int) -> Shape:
        num_blocks = max(total_nbytes // block_nbytes, 8)
        return cls(block_nbytes, num_blocks, min(64, max((64 << 20) // block_nbytes, 4), num_blocks))

    @property
    def nbytes(self) -> int:
        return self.block_nbytes * self.num_blocks

    @property
    def layout(self) -> OpaqueLayout:
        return OpaqueLayout(self.block_nbytes, b"bench-store-16-b")

    def keys(self, generation: int) -> list[BlockKey]:
        """Names that differ between generations."""
        first = generation * self.num_blocks
        return [BlockKey((first + i).to_bytes(16, "big")) for i in range(self.num_blocks)]

    def batches(self) -> list[slice]:
        return [slice(at, at + self.batch) for at in range(0, self.num_blocks, self.batch)]

    def memory(self, name: str) -> list[Bytes]:
        """The blocks of a pool such as a node's: shared memory, filled with noise."""
        pool = allocate(self.nbytes, name, "memfd")
        blocks = pool.array.reshape(self.num_blocks, self.block_nbytes)
        rng = np.random.default_rng(1)
        for block in blocks:
            block[:] = rng.integers(0, 256, self.block_nbytes, dtype=np.uint8)
        pool.close()
        return list(blocks)

    def gb_per_s(self, seconds: float) -> float:
        """Of moving all blocks."""
        return self.nbytes / seconds / 1e9
