"""Arrays, tensors and buffers as bytes that can be moved, and back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.client.errors import BadObject
from transfer import Region, TransferAgent

# From here on memory comes in huge pages, all of them present: a first touch costs more than the transfer.
_ALLOCATE_NBYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class ArrayType:
    """``dtype`` is numpy's name, or the library's own where numpy has none (``bfloat16``)."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int


def type_of(value: Any) -> ArrayType:
    """What ``value`` is: a numpy array, a tensor of a library that speaks DLPack, or any buffer.

    Raises ``BadObject`` for what is neither, is not contiguous, or holds Python objects.
    """
    if not isinstance(value, np.ndarray) and hasattr(value, "__dlpack__"):
        dtype = str(value.dtype).rpartition(".")[2]
        itemsize = getattr(value, "itemsize", None) or value.dtype.itemsize
        shape = tuple(int(size) for size in value.shape)
        return ArrayType(dtype, shape, int(np.prod(shape, dtype=np.int64)) * int(itemsize))
    array = _as_numpy(value)
    if array.dtype.hasobject or array.dtype.names is not None:
        raise BadObject(
            f"an array of {array.dtype} cannot be stored, only numbers can; its bytes: array.view('u1')"
        )
    if not array.flags.c_contiguous:
        raise BadObject("only contiguous arrays can be stored: np.ascontiguousarray(array) makes one")
    plain = array.dtype.isnative and array.dtype.kind in "biufc"
    return ArrayType(array.dtype.name if plain else array.dtype.str, array.shape, array.nbytes)


def register(agent: TransferAgent, value: Any, *, writable: bool) -> Region:
    """The value's own memory as a region; the caller closes it. Raises ``BadObject``."""
    try:
        if not isinstance(value, np.ndarray) and not hasattr(value, "__dlpack__"):
            value = _as_numpy(value)
        return agent.register(value, writable=writable)
    except (ValueError, TypeError, BufferError, RuntimeError) as error:
        raise BadObject(f"this memory cannot be used: {error}") from error


def check_fits(name: str, stored: ArrayType, out: Any) -> None:
    """Raises ``BadObject`` unless ``out`` can take the object's bytes: as many, and of its dtype or plain
    bytes."""
    target = type_of(out)
    if target.nbytes != stored.nbytes:
        raise BadObject(
            f"{name!r} has {stored.nbytes} bytes ({stored.dtype}{list(stored.shape)}), "
            f"what it should be read into {target.nbytes}"
        )
    if target.dtype not in (stored.dtype, "uint8") and stored.dtype != "uint8":
        raise BadObject(f"{name!r} is of {stored.dtype}, what it should be read into of {target.dtype}")


class Receiver:
    """Memory for an object on its way here; ``region`` is None when it is empty. ``close`` it when read."""

    def __init__(self, agent: TransferAgent, name: str, stored: ArrayType, out: Any = None) -> None:
        """``out``: the caller's own memory; None: a new array.

        Raises ``BadObject``: ``out`` cannot take it, or numpy knows no such dtype.
        """
        self.region: Region | None = None
        self._stored = stored
        self._dtype = None
        self._memory: npt.NDArray[np.uint8] = np.empty(0, np.uint8)
        if out is not None:
            check_fits(name, stored, out)
            if stored.nbytes:
                self.region = register(agent, out, writable=True)
            return
        try:
            self._dtype = np.dtype(stored.dtype)
        except TypeError:
            raise BadObject(
                f"{name!r} is of {stored.dtype}, which numpy has not: read it with get_into, for example "
                f"into torch.empty({list(stored.shape)}, dtype=torch.{stored.dtype})"
            ) from None
        if stored.nbytes >= _ALLOCATE_NBYTES:
            self.region = agent.allocate(stored.nbytes, "get")
            self._memory = self.region.array
        elif stored.nbytes:
            self._memory = np.empty(stored.nbytes, np.uint8)
            self.region = agent.register(self._memory)

    def close(self) -> None:
        """Nothing moves into the memory any more; what was read stays. Idempotent."""
        if self.region is not None:
            self.region.close()

    @property
    def array(self) -> npt.NDArray[Any]:
        """The new array, over the very memory that was read into."""
        return self._memory.view(self._dtype).reshape(self._stored.shape)


def _as_numpy(value: Any) -> npt.NDArray[Any]:
    if isinstance(value, np.ndarray):
        return value
    try:
        return np.asarray(memoryview(value))
    except (TypeError, ValueError) as error:
        raise BadObject(
            f"{type(value).__name__} cannot be stored: only arrays, tensors in host memory and buffers can"
        ) from error
