"""Columns of numbers, and their addresses."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]
Index = npt.NDArray[np.intp]


def address_of(array: npt.NDArray[np.generic]) -> int:
    """The address of the first element. Much cheaper than ``array.ctypes.data``."""
    return int(array.__array_interface__["data"][0])
