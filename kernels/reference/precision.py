"""The dtype that arithmetic is done in."""

from __future__ import annotations

import torch
from torch import Tensor


def wide(x: Tensor) -> Tensor:
    """``x`` in the dtype it is computed in: float64 stays, everything else becomes float32."""
    return x if x.dtype == torch.float64 else x.float()
