"""Memory that callers own: by the buffer protocol, DLPack or the CUDA array interface."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np
import numpy.typing as npt

from moonpool.transfer.memory.allocation import DeviceMemory, Memory
from moonpool.transfer.native.cuda import Cuda

if TYPE_CHECKING:
    from typing_extensions import Buffer

# Device types of DLPack.
_CPU, _CUDA, _CUDA_HOST = 1, 2, 3
_CAPSULE_NAME = b"dltensor"


class SupportsDLPack(Protocol):
    def __dlpack__(self) -> object: ...


class SupportsCuda(Protocol):
    @property
    def __cuda_array_interface__(self) -> dict[str, Any]: ...


class _Tensor(ctypes.Structure):
    """``DLTensor`` of dlpack.h."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


_pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_of.restype = ctypes.c_void_p
_pointer_of.argtypes = (ctypes.py_object, ctypes.c_char_p)


def is_on_device(buffer: object) -> bool:
    """Whether ``buffer`` is in the memory of a CUDA device."""
    if hasattr(buffer, "__dlpack_device__"):
        return bool(buffer.__dlpack_device__()[0] == _CUDA)
    return hasattr(buffer, "__cuda_array_interface__")


def adopt_device(buffer: Any, writable: bool, cuda: Cuda) -> DeviceMemory:
    """The memory of a buffer that ``is_on_device``. Waits for no stream. Raises ValueError: not usable."""
    owner: object = buffer
    if hasattr(buffer, "__dlpack__"):
        # torch exports a tensor only where its device is the thread's current one. -1: no stream waits.
        with cuda.on(int(buffer.__dlpack_device__()[1])):
            owner, view = _capsule(buffer, stream=-1)
        address, nbytes = _extent(view)
    else:
        interface = buffer.__cuda_array_interface__
        address, readonly = interface["data"]
        itemsize = np.dtype(interface["typestr"]).itemsize
        shape, strides = list(interface["shape"]), interface.get("strides")
        _require_contiguous(shape, strides and [stride // itemsize for stride in strides])
        nbytes = _count(shape) * itemsize
        if writable and readonly:
            raise ValueError("the buffer is read-only; register it with writable=False")
    if nbytes == 0:
        raise ValueError("memory of zero bytes cannot be registered")
    device = cuda.device_of(address)
    if device is None or cuda.device_of(address + nbytes - 1) != device:
        raise ValueError(f"the {nbytes} bytes at {address:#x} are not in one device's memory")
    return DeviceMemory(address, nbytes, device, owner)


def adopt(buffer: Buffer | SupportsDLPack | SupportsCuda, writable: bool) -> Memory:
    """Host memory by the buffer protocol or DLPack. Raises ValueError: not usable, TypeError: neither."""
    owner: object = None
    readonly = False
    if isinstance(buffer, np.ndarray):
        if buffer.dtype.hasobject:
            raise ValueError("an array of Python objects cannot be registered: it contains addresses")
        # memoryview does not support bfloat16 and similar types.
        if not buffer.flags.c_contiguous:
            raise ValueError("only contiguous memory can be registered")
        array, readonly = buffer.reshape(-1).view(np.uint8), not buffer.flags.writeable
    elif hasattr(buffer, "__dlpack__"):
        array, owner = _tensor_bytes(cast(SupportsDLPack, buffer))
    else:
        view = memoryview(cast("Buffer", buffer))
        if not view.c_contiguous:
            raise ValueError("only contiguous memory can be registered")
        array, readonly = np.frombuffer(view.cast("B"), np.uint8), view.readonly
    if len(array) == 0:
        raise ValueError("memory of zero bytes cannot be registered")
    if writable and readonly:
        raise ValueError("the buffer is read-only; register it with writable=False")
    return Memory(array, "registered", -1, owner)


def _tensor_bytes(tensor: SupportsDLPack) -> tuple[npt.NDArray[np.uint8], object]:
    """The memory of ``tensor`` as uint8 [nbytes], and its owner."""
    capsule, view = _capsule(tensor)
    if view.device_type not in (_CPU, _CUDA_HOST):
        raise ValueError(f"the tensor is on a device (DLPack type {view.device_type}), not in host memory")
    address, nbytes = _extent(view)
    if nbytes == 0:
        return np.empty(0, np.uint8), capsule
    memory: Any = (ctypes.c_uint8 * nbytes).from_address(address)
    return np.frombuffer(memory, np.uint8), capsule


def _capsule(tensor: Any, **arguments: int) -> tuple[object, _Tensor]:
    # The capsule is not consumed, so its destructor frees the tensor.
    capsule = tensor.__dlpack__(**arguments)
    return capsule, _Tensor.from_address(_pointer_of(capsule, _CAPSULE_NAME))


def _extent(view: _Tensor) -> tuple[int, int]:
    """(address, bytes) of a contiguous tensor."""
    shape = view.shape[: view.ndim]
    _require_contiguous(shape, view.strides[: view.ndim] if view.strides else None)
    return (view.data or 0) + view.byte_offset, _count(shape) * view.bits * view.lanes // 8


def _count(shape: list[int]) -> int:
    return int(np.prod(shape, dtype=np.int64))


def _require_contiguous(shape: list[int], strides: list[int] | None) -> None:
    """strides: in elements; None: contiguous."""
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides or ()), strict=strides is not None):
        if size != 1 and stride != expected:
            raise ValueError("only contiguous memory can be registered")
        expected *= size
