"""The limit of a copy here: memcpy on one thread, block by block, in the pattern of the batch."""

from __future__ import annotations

import ctypes
import time

import numpy as np

from moonpool.bench.transfer.batch_shape import Shape
from moonpool.transfer.native.arrays import U64, address_of

# Below this size the loop over blocks in Python would be measured; numpy's gather copies rows with memcpy.
_LOOP_NBYTES = 32 << 10

Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]


class MemoryCopy:
    def __init__(self, shape: Shape, to: Bytes, source: Bytes) -> None:
        self._shape = shape
        self._to, self._source = to, source
        self._to_at, self._source_at = shape.offsets(len(to), 0), shape.offsets(len(source), 1)

    def move(self) -> float:
        """Seconds for one pass over all blocks."""
        size = self._shape.block_nbytes
        if size < _LOOP_NBYTES:
            blocks = len(self._to_at)
            out = self._to[: blocks * size].reshape(blocks, size)
            rows, where = self._source.reshape(-1, size), (self._source_at // np.uint64(size)).astype(np.intp)
            started = time.perf_counter()
            np.take(rows, where, axis=0, out=out, mode="clip")
            return time.perf_counter() - started
        to_addresses = self._addresses(self._to, self._to_at)
        source_addresses = self._addresses(self._source, self._source_at)
        pairs = list(zip(to_addresses, source_addresses, strict=True))
        started = time.perf_counter()
        for to, source in pairs:
            ctypes.memmove(to, source, size)
        return time.perf_counter() - started

    @staticmethod
    def _addresses(array: Bytes, offsets: U64) -> list[int]:
        base = address_of(array)
        return [base + offset for offset in offsets.tolist()]
