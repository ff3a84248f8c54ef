"""The limits of a copy on one machine: memcpy on one thread, and the device's own copy."""

from __future__ import annotations

import ctypes
import time

import numpy as np

from moonpool.bench.transfer.device_memory import DeviceBuffer
from moonpool.bench.transfer.shapes import Shape
from moonpool.transfer.native.arrays import U64, address_of
from moonpool.transfer.native.cuda import Cuda

# For smaller blocks a loop in Python would be measured; numpy's gather copies rows with memcpy.
_LOOP_NBYTES = 32 << 10

Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]


class MemoryCopy:
    """Copies between two arrays of this process."""

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


class DeviceCopy:
    """Copies to or from ``pool`` by the device itself."""

    def __init__(self, cuda: Cuda, shape: Shape, pool: DeviceBuffer, other: int) -> None:
        """other: the address of as many bytes, of the device or of locked host memory."""
        self._cuda = cuda
        here = shape.offsets(pool.nbytes, 0) + np.uint64(pool.address)
        there = shape.offsets(pool.nbytes, 1) + np.uint64(other)
        self._to, self._source = (here, there) if shape.direction == "read" else (there, here)
        self._sizes = np.full(len(here), shape.block_nbytes, np.uint64)
        self._stream = cuda.new_stream()

    def move(self) -> float:
        """Seconds for one pass over all blocks."""
        started = time.perf_counter()
        self._cuda.copy(self._to, self._source, self._sizes, self._stream)
        self._cuda.wait_for_stream(self._stream)
        return time.perf_counter() - started
