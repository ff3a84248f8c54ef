"""Regions in the memory of a CUDA device, seen as those in the host's are: by ``array`` and ``buffer``."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moonpool.bench.transfer.device_memory import Bytes, DeviceBuffer
from moonpool.transfer import Region, TransferAgent
from moonpool.transfer.native.cuda import CudaUnavailable, load_cuda

NEEDS_GPU = "needs an NVIDIA GPU: `make gpu`, on a machine that has one"


@functools.cache
def stand_in() -> str:
    """The path of ``stand_in.c``, compiled."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler for the stand-in of the CUDA runtime")
    source = Path(__file__).with_name("stand_in.c")
    library = Path(tempfile.mkdtemp(prefix="moonpool-")) / "libcudart-stand-in.so"
    options = ("-O1", "-Wall", "-Wno-unused-parameter", "-Werror", "-shared", "-fPIC", "-pthread")
    subprocess.run([compiler, *options, "-o", str(library), str(source)], check=True)
    return str(library)


def use_stand_in(monkeypatch: pytest.MonkeyPatch, **settings: object) -> dict[str, str]:
    """Load it as the CUDA runtime of this process; returns the environment for others. See ``stand_in.c``."""
    environment = {"MOONPOOL_CUDART": stand_in()}
    environment |= {f"STAND_IN_{name}": str(value) for name, value in settings.items()}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    load_cuda.cache_clear()
    return environment


def use_gpu() -> dict[str, str]:
    """The same of the real one. Skips where there is none."""
    load_cuda.cache_clear()
    try:
        load_cuda()
    except CudaUnavailable as error:
        pytest.skip(f"{NEEDS_GPU} ({error})")
    return {name: os.environ[name] for name in ("MOONPOOL_CUDART",) if name in os.environ}


class Owned(DeviceBuffer):
    """Freed with the last reference, of a test or a region."""

    def __del__(self) -> None:
        self.free()


class DeviceArray:
    """What tests do with ``Region.array``, by copies."""

    def __init__(self, buffer: DeviceBuffer) -> None:
        self._buffer = buffer

    def __len__(self) -> int:
        return self._buffer.nbytes

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Bytes:
        return self._buffer.read(0, self._buffer.nbytes)

    def __getitem__(self, part: slice) -> Bytes:
        begin, end, _ = part.indices(len(self))
        return self._buffer.read(begin, end - begin)

    def __setitem__(self, part: slice | int, value: Any) -> None:
        part = slice(part, part + 1) if isinstance(part, int) else part
        begin, end, _ = part.indices(len(self))
        data = np.empty(end - begin, np.uint8)
        data[:] = value
        self._buffer.write(begin, data)

    def __eq__(self, other: object) -> Any:
        return np.asarray(self) == other

    def tobytes(self) -> bytes:
        return np.asarray(self).tobytes()


class DeviceRegion:
    """A region of ``nbytes`` of a device."""

    def __init__(self, agent: TransferAgent, nbytes: int, *, writable: bool = True, device: int = 0) -> None:
        buffer = Owned(load_cuda(), nbytes, device)
        self.region: Region = agent.register(buffer, writable=writable)
        self.array = DeviceArray(buffer)
        self.id, self.nbytes = self.region.id, nbytes

    @property
    def buffer(self) -> memoryview:
        return memoryview(np.asarray(self.array))

    def close(self) -> None:
        self.region.close()

    def __enter__(self) -> DeviceRegion:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
