"""The batches that are measured: blocks, how many, which way."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moonpool.bench.harness.sizes import KIB, MIB, size_name
from moonpool.transfer import Spans
from moonpool.transfer.native.arrays import U64

# Of the pool of each side: more than the caches hold.
POOL_NBYTES = 512 * MIB
_WAYS = ("read", "write")


@dataclass(frozen=True, slots=True)
class Shape:
    """``batch`` blocks of ``block_nbytes``; scattered: each side in its own random order; ``parallel``
    batches at once.
    """

    block_nbytes: int
    batch: int
    direction: str = "read"
    scattered: bool = True
    parallel: int = 1

    @property
    def nbytes(self) -> int:
        """Of all batches together."""
        return self.block_nbytes * self.batch * self.parallel

    @property
    def name(self) -> str:
        parts = [size_name(self.block_nbytes), str(self.batch), self.direction]
        if not self.scattered:
            parts.append("contiguous")
        if self.parallel > 1:
            parts.append(f"x{self.parallel}")
        return "/".join(parts)

    def offsets(self, pool_nbytes: int, side: int) -> U64:
        """The blocks of all batches in the pool of ``side`` 0 or 1: uint64 [batch * parallel]."""
        blocks = self.batch * self.parallel
        if not self.scattered:
            return np.arange(blocks, dtype=np.uint64) * np.uint64(self.block_nbytes)
        slots = np.random.default_rng(side + 1).permutation(pool_nbytes // self.block_nbytes)[:blocks]
        return slots.astype(np.uint64) * np.uint64(self.block_nbytes)

    def spans(self, region: int, pool_nbytes: int, side: int) -> list[Spans]:
        """One ``Spans`` for each of the parallel batches."""
        offsets = self.offsets(pool_nbytes, side)
        return [
            Spans.blocks(region, offsets[i : i + self.batch], self.block_nbytes)
            for i in range(0, len(offsets), self.batch)
        ]


def small_shapes() -> list[Shape]:
    """Batches of which the steps around the copy take a large part of the time."""
    return [Shape(block, batch, way) for block, batch in ((4 * KIB, 1), (64 * KIB, 16)) for way in _WAYS]


def default_shapes() -> list[Shape]:
    """The shapes that the goals are about."""
    shapes = [
        Shape(block, batch, way)
        for block, batch in ((4 * KIB, 1), (4 * KIB, 4096), (64 * KIB, 1024), (MIB, 64))
        for way in _WAYS
    ]
    return [*shapes, Shape(4 * MIB, 64), Shape(MIB, 64, scattered=False), Shape(MIB, 64, parallel=2)]
