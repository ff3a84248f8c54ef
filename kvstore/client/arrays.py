"""Arrays, tensors and buffers as bytes, and back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from moonpool.kvstore.client.errors import BadObject


@dataclass(frozen=True, slots=True)
class ArrayType:
    """``dtype`` is numpy's name, or the library's own where numpy has none (``bfloat16``)."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int


def type_of(value: Any) -> ArrayType:
    """The type of a numpy array, a tensor of a library with DLPack, or any buffer.

    Raises ``BadObject``: it is none of these, not contiguous, or holds Python objects.
    """
    if not isinstance(value, np.ndarray) and hasattr(value, "__dlpack__"):
        dtype = str(value.dtype).rpartition(".")[2]
        itemsize = getattr(value, "itemsize", None) or value.dtype.itemsize
        shape = tuple(int(size) for size in value.shape)
        return ArrayType(dtype, shape, int(np.prod(shape, dtype=np.int64)) * int(itemsize))
    array = _as_numpy(value)
    if array.dtype.hasobject or array.dtype.names is not None:
        raise BadObject(f"an array of {array.dtype} cannot be stored; store its bytes: array.view('u1')")
    if not array.flags.c_contiguous:
        raise BadObject("only contiguous arrays can be stored: np.ascontiguousarray(array) makes one")
    plain = array.dtype.isnative and array.dtype.kind in "biufc"
    return ArrayType(array.dtype.name if plain else array.dtype.str, array.shape, array.nbytes)


def as_buffer(value: Any) -> Any:
    """``value`` as the transfer can register it: an array, or an object with DLPack."""
    return value if hasattr(value, "__dlpack__") else _as_numpy(value)


def check_fits(name: str, stored: ArrayType, out: Any) -> None:
    """Raises ``BadObject`` unless ``out`` has the object's size, and its dtype or plain bytes."""
    target = type_of(out)
    if target.nbytes != stored.nbytes:
        raise BadObject(
            f"{name!r} has {stored.nbytes} bytes ({stored.dtype}{list(stored.shape)}), "
            f"the memory to read it into has {target.nbytes}"
        )
    if target.dtype not in (stored.dtype, "uint8") and stored.dtype != "uint8":
        raise BadObject(f"{name!r} is of {stored.dtype}, the memory to read it into of {target.dtype}")


def view_as(name: str, stored: ArrayType, memory: npt.NDArray[np.uint8]) -> npt.NDArray[Any]:
    """The object over the bytes read. Raises ``BadObject``: numpy has no such dtype."""
    return memory.view(_numpy_dtype(name, stored)).reshape(stored.shape)


def check_known(name: str, stored: ArrayType) -> None:
    """Raises ``BadObject``: numpy has no such dtype."""
    _numpy_dtype(name, stored)


def _numpy_dtype(name: str, stored: ArrayType) -> np.dtype[Any]:
    try:
        return np.dtype(stored.dtype)
    except TypeError:
        raise BadObject(
            f"{name!r} is of {stored.dtype}, which numpy does not have: read it with get_into, for example "
            f"into torch.empty({list(stored.shape)}, dtype=torch.{stored.dtype})"
        ) from None


def _as_numpy(value: Any) -> npt.NDArray[Any]:
    if isinstance(value, np.ndarray):
        return value
    try:
        return np.asarray(memoryview(value))
    except (TypeError, ValueError) as error:
        raise BadObject(
            f"{type(value).__name__} cannot be stored: only arrays, tensors in host memory and buffers can"
        ) from error
