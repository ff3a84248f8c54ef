"""How an argument that must not be is refused."""

from __future__ import annotations

import torch
from torch import Tensor

from moonpool.runtime.errors import MoonpoolError


class KernelMisuse(MoonpoolError):
    """A kernel was called with tensors it must not be given. Nothing has been read or written."""


def require(holds: bool, what: str) -> None:
    if not holds:
        raise KernelMisuse(what)


def require_tensor(name: str, x: Tensor, dtype: torch.dtype, *shape: int) -> None:
    require(x.dtype == dtype, f"{name} must be {dtype}, is {x.dtype}")
    require(x.shape == shape, f"{name} must have the shape {list(shape)}, has {list(x.shape)}")
    require(x.is_contiguous(), f"{name} must be contiguous, has strides {x.stride()}")
