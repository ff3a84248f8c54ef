"""Memory of a CUDA device, with the interface that libraries of GPU arrays have."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from moonpool.transfer.native.arrays import address_of
from moonpool.transfer.native.cuda import Cuda

Bytes = npt.NDArray[np.uint8]
_STEP_NBYTES = 64 << 20


class DeviceBuffer:
    """``nbytes`` of ``device``, zeroed. ``free`` it, or use it in a ``with``."""

    def __init__(self, cuda: Cuda, nbytes: int, device: int = 0) -> None:
        """Raises CudaError."""
        self._cuda = cuda
        self._device = device
        self.nbytes = nbytes
        with cuda.on(device):
            self.address = cuda.allocate(nbytes)
            self._stream = cuda.new_stream()
        zeros = np.zeros(min(nbytes, _STEP_NBYTES), np.uint8)
        for at in range(0, nbytes, _STEP_NBYTES):
            self.write(at, zeros[: nbytes - at])

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": (self.nbytes,), "typestr": "|u1", "data": (self.address, False), "version": 3}

    def write(self, offset: int, data: Bytes) -> None:
        """Returns when the bytes are in place."""
        self._copy(self.address + offset, address_of(data), len(data))

    def read(self, offset: int, nbytes: int) -> Bytes:
        data = np.empty(nbytes, np.uint8)
        if nbytes:
            self._copy(address_of(data), self.address + offset, nbytes)
        return data

    def _copy(self, to: int, source: int, nbytes: int) -> None:
        here, there, size = np.array([[to], [source], [nbytes]], np.uint64)
        with self._cuda.on(self._device):
            self._cuda.copy(here, there, size, self._stream)
            self._cuda.wait_for_stream(self._stream)

    def free(self) -> None:
        with self._cuda.on(self._device):
            self._cuda.destroy_stream(self._stream)
            self._cuda.free(self.address)

    def __enter__(self) -> DeviceBuffer:
        return self

    def __exit__(self, *_: object) -> None:
        self.free()
