"""Tensors of other libraries as plain bytes, through DLPack: torch and its like need not be imported for
that.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt

_CPU, _CUDA_HOST = 1, 3
_CAPSULE_NAME = b"dltensor"


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


def tensor_bytes(tensor: Any) -> tuple[npt.NDArray[np.uint8], object]:
    """The memory of ``tensor`` as uint8 [nbytes], and what must be kept for as long as that is used.

    Raises ValueError when it is not contiguous, or not in host memory.
    """
    capsule = tensor.__dlpack__()
    # Not consumed: the capsule itself then frees what it holds, when it goes.
    view = _Tensor.from_address(_pointer_of(capsule, _CAPSULE_NAME))
    if view.device_type not in (_CPU, _CUDA_HOST):
        raise ValueError(
            f"the tensor is on a device (DLPack type {view.device_type}); only host memory can be moved"
        )
    shape = view.shape[: view.ndim]
    if view.strides and not _is_contiguous(shape, view.strides[: view.ndim]):
        raise ValueError("only contiguous memory can be registered")
    nbytes = int(np.prod(shape, dtype=np.int64)) * view.bits * view.lanes // 8
    if nbytes == 0:
        return np.empty(0, np.uint8), capsule
    memory = (ctypes.c_uint8 * nbytes).from_address(view.data + view.byte_offset)
    return np.frombuffer(memory, np.uint8), capsule


def _is_contiguous(shape: list[int], strides: list[int]) -> bool:
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True
