"""The CUDA runtime, by ctypes: finding libcudart, and the calls that are used."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from moonpool.runtime.failures import FailureClass
from moonpool.transfer.errors import TransferError
from moonpool.transfer.native.arrays import U64, address_of

IPC_HANDLE_NBYTES = 64
_SYSTEM = ("/usr/local/cuda/lib64", "/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu")
_INSTALL = "pip install nvidia-cuda-runtime (for CUDA 13) or nvidia-cuda-runtime-cu12"

# Values of the runtime's enums.
_SUCCESS, _NEWER_DRIVER, _NOT_SUPPORTED = 0, 36, 801
_DEVICE_MEMORY = 2
_COPY_DEFAULT = 4
_STREAM_NON_BLOCKING = 1
_EVENT_BLOCKING_SYNC, _EVENT_DISABLE_TIMING = 1, 2
_HOST_REGISTER_PORTABLE = 1
_IPC_LAZY_PEER_ACCESS = 1
_ACCESS_ORDER_STREAM = 1


class CudaUnavailable(TransferError):
    """There is no CUDA runtime, so device memory cannot be moved."""

    code = "FAILED_PRECONDITION"
    failure = FailureClass.DEVICE


class CudaError(TransferError):
    """A call of the CUDA runtime failed."""

    code = "UNAVAILABLE"
    failure = FailureClass.DEVICE

    def __init__(self, call: str, status: int, reason: str) -> None:
        super().__init__(f"{call} failed: {reason} ({status})")
        self.status = status


class _PointerAttributes(ctypes.Structure):
    _fields_ = [
        ("type", ctypes.c_int),
        ("device", ctypes.c_int),
        ("device_pointer", ctypes.c_void_p),
        ("host_pointer", ctypes.c_void_p),
        ("rest", ctypes.c_uint8 * 64),
    ]


class _IpcHandle(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_uint8 * IPC_HANDLE_NBYTES)]


class _CopyAttributes(ctypes.Structure):
    _fields_ = [
        ("source_access_order", ctypes.c_int),
        ("source_hint", ctypes.c_int * 2),
        ("destination_hint", ctypes.c_int * 2),
        ("flags", ctypes.c_uint),
    ]


_pointer, _size, _int, _uint = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_uint
_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "cudaRuntimeGetVersion": (_pointer,),
    "cudaGetDeviceCount": (_pointer,),
    "cudaGetDevice": (_pointer,),
    "cudaSetDevice": (_int,),
    "cudaGetLastError": (),
    "cudaPointerGetAttributes": (_pointer, _pointer),
    "cudaMalloc": (_pointer, _size),
    "cudaFree": (_pointer,),
    "cudaHostRegister": (_pointer, _size, _uint),
    "cudaHostUnregister": (_pointer,),
    "cudaStreamCreateWithFlags": (_pointer, _uint),
    "cudaStreamSynchronize": (_pointer,),
    "cudaStreamDestroy": (_pointer,),
    "cudaEventCreateWithFlags": (_pointer, _uint),
    "cudaEventRecord": (_pointer, _pointer),
    "cudaEventSynchronize": (_pointer,),
    "cudaEventDestroy": (_pointer,),
    "cudaMemcpyAsync": (_pointer, _pointer, _size, _int, _pointer),
    "cudaIpcGetMemHandle": (_pointer, _pointer),
    "cudaIpcOpenMemHandle": (_pointer, _IpcHandle, _uint),
    "cudaIpcCloseMemHandle": (_pointer,),
}


class Cuda:
    """A loaded CUDA runtime with a device. Thread-safe; all methods raise CudaError.

    Addresses, streams and events are integers. Calls apply to the current device, see ``on``.
    """

    def __init__(self, path: str) -> None:
        """Raises OSError when it cannot be loaded, CudaError when it finds no driver or device."""
        self.path = path
        self._library = ctypes.CDLL(path)
        # Keeps the GIL, for short calls: winning it back may take longer.
        self._quick = ctypes.PyDLL(path)
        self._error_string = self._library.cudaGetErrorString
        self._error_string.restype, self._error_string.argtypes = ctypes.c_char_p, (_int,)
        for name, arguments in _FUNCTIONS.items():
            for library in (self._library, self._quick):
                getattr(library, name).argtypes = arguments
        version = self._integer("cudaRuntimeGetVersion")
        self.version = version // 1000, version % 1000 // 10
        self.num_devices = self._integer("cudaGetDeviceCount")
        self._batch = self._find_batch()
        self._address_range = self._find_address_range()

    def _find_batch(self) -> Any:
        """cudaMemcpyBatchAsync of runtime 12.8 and later, or None."""
        batch = getattr(self._library, "cudaMemcpyBatchAsync", None) if self.version >= (12, 8) else None
        if batch is not None:
            # Up to 12.9 it also returned the index of a refused copy.
            failed = (_pointer,) if self.version < (13, 0) else ()
            batch.argtypes = (*(_pointer,) * 3, _size, *(_pointer,) * 2, _size, *failed, _pointer)
        return batch

    def _find_address_range(self) -> Any:
        for library in (self._library, _load("libcuda.so.1")):
            if library is not None and hasattr(library, "cuMemGetAddressRange_v2"):
                function = library.cuMemGetAddressRange_v2
                function.argtypes = (_pointer, _pointer, ctypes.c_uint64)
                return function
        return None

    def _check(self, call: str, status: int) -> None:
        if status != _SUCCESS:
            # Clear the thread's last error: otherwise the next call would report it again.
            self._quick.cudaGetLastError()
            raise CudaError(call, status, self._error_string(status).decode())

    def _run(self, call: str, *arguments: Any) -> None:
        self._check(call, getattr(self._library, call)(*arguments))

    def _integer(self, call: str) -> int:
        value = ctypes.c_int()
        self._check(call, getattr(self._quick, call)(ctypes.byref(value)))
        return value.value

    def _new(self, call: str, *arguments: Any) -> int:
        """The new object of a call that returns it by its first argument."""
        made = ctypes.c_void_p()
        self._run(call, ctypes.byref(made), *arguments)
        assert made.value is not None
        return made.value

    @contextlib.contextmanager
    def on(self, device: int) -> Iterator[None]:
        """Make ``device`` the calling thread's current one, and restore the previous one."""
        before = self._integer("cudaGetDevice")
        # Even if it is current already: this also sets the context that driver calls need.
        self._run("cudaSetDevice", device)
        try:
            yield
        finally:
            # An unneeded call would allocate memory of a device that is not in use yet.
            if before != device:
                self._run("cudaSetDevice", before)

    # ------------------------------------------------------------------ memory

    def device_of(self, address: int) -> int | None:
        """The ordinal of the device that has this memory; None: no device."""
        attributes = _PointerAttributes()
        self._run("cudaPointerGetAttributes", ctypes.byref(attributes), address)
        return int(attributes.device) if attributes.type == _DEVICE_MEMORY else None

    def allocate(self, nbytes: int) -> int:
        return self._new("cudaMalloc", nbytes)

    def free(self, address: int) -> None:
        self._run("cudaFree", address)

    def pin(self, address: int, nbytes: int) -> None:
        """Pin host memory, so that the driver copies it without an intermediate copy."""
        self._run("cudaHostRegister", address, nbytes, _HOST_REGISTER_PORTABLE)

    def unpin(self, address: int) -> None:
        self._run("cudaHostUnregister", address)

    # ------------------------------------------------------------------ streams

    def new_stream(self) -> int:
        return self._new("cudaStreamCreateWithFlags", _STREAM_NON_BLOCKING)

    def wait_for_stream(self, stream: int) -> None:
        """Wait for everything enqueued."""
        self._run("cudaStreamSynchronize", stream)

    def destroy_stream(self, stream: int) -> None:
        self._run("cudaStreamDestroy", stream)

    def new_event(self) -> int:
        """An event for which threads wait without spinning."""
        return self._new("cudaEventCreateWithFlags", _EVENT_BLOCKING_SYNC | _EVENT_DISABLE_TIMING)

    def record(self, event: int, stream: int) -> None:
        self._check("cudaEventRecord", self._quick.cudaEventRecord(event, stream))

    def wait_for_event(self, event: int) -> None:
        self._run("cudaEventSynchronize", event)

    def destroy_event(self, event: int) -> None:
        self._run("cudaEventDestroy", event)

    def copy(self, to: U64, source: U64, nbytes: U64, stream: int) -> None:
        """Enqueue copies of ``nbytes[i]`` from ``source[i]`` to ``to[i]``, in device or host memory."""
        if len(nbytes) > 1 and self._batch is not None and self._copy_batch(to, source, nbytes, stream):
            return
        for here, there, size in zip(to.tolist(), source.tolist(), nbytes.tolist(), strict=True):
            self._run("cudaMemcpyAsync", here, there, size, _COPY_DEFAULT, stream)

    def _copy_batch(self, to: U64, source: U64, nbytes: U64, stream: int) -> bool:
        """False: the driver does not support the call."""
        attributes = _CopyAttributes(_ACCESS_ORDER_STREAM)
        first, failed = ctypes.c_size_t(), ctypes.c_size_t()
        columns = [np.ascontiguousarray(column) for column in (to, source, nbytes)]
        status = self._batch(
            *map(address_of, columns),
            len(nbytes),
            ctypes.byref(attributes),
            ctypes.byref(first),
            1,
            *((ctypes.byref(failed),) if self.version < (13, 0) else ()),
            stream,
        )
        if status in (_NEWER_DRIVER, _NOT_SUPPORTED):
            self._quick.cudaGetLastError()
            self._batch = None
            return False
        self._check("cudaMemcpyBatchAsync", status)
        return True

    # ------------------------------------------------------------------ other processes

    def export(self, address: int) -> tuple[bytes, int]:
        """(handle of the allocation of ``address``, offset in it).

        Allocations mapped in parts (torch's expandable segments, memory pools) have no such handle.
        """
        if self._address_range is None:
            raise CudaUnavailable("libcuda, which belongs to the driver, has no cuMemGetAddressRange")
        base, nbytes = ctypes.c_uint64(), ctypes.c_size_t()
        status = self._address_range(ctypes.byref(base), ctypes.byref(nbytes), address)
        self._check("cuMemGetAddressRange", status)
        handle = _IpcHandle()
        self._run("cudaIpcGetMemHandle", ctypes.byref(handle), base.value)
        return bytes(handle.bytes), address - base.value

    def open(self, handle: bytes) -> int:
        """Map another process's allocation for the current device, and return its address."""
        return self._new("cudaIpcOpenMemHandle", _IpcHandle.from_buffer_copy(handle), _IPC_LAZY_PEER_ACCESS)

    def close(self, address: int) -> None:
        self._run("cudaIpcCloseMemHandle", address)


@functools.cache
def load_cuda() -> Cuda:
    """The runtime in ``MOONPOOL_CUDART``, or the first of the wheels' and the system's that works.

    Raises CudaUnavailable, with the reasons.
    """
    reasons: list[str] = []
    for path in _candidates():
        try:
            return Cuda(path)
        except (OSError, AttributeError, CudaError) as error:
            reasons.append(f"{path}: {error}")
    if not reasons:
        raise CudaUnavailable(f"there is no libcudart: {_INSTALL}")
    raise CudaUnavailable(f"no libcudart works here: {'; '.join(reasons)}")


def _candidates() -> list[str]:
    if named := os.environ.get("MOONPOOL_CUDART"):
        return [named]
    folders = [Path(name) for name in os.environ.get("LD_LIBRARY_PATH", "").split(":") if name]
    wheels = importlib.util.find_spec("nvidia")
    for parent in wheels.submodule_search_locations or () if wheels is not None else ():
        folders += [Path(parent) / name / "lib" for name in ("cu13", "cuda_runtime")]
    folders += map(Path, _SYSTEM)
    found = [path for folder in folders for path in sorted(folder.glob("libcudart.so.1[23]"), reverse=True)]
    return list(dict.fromkeys(str(path.resolve()) for path in found))


def _load(name: str) -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(name)
    except OSError:
        return None
