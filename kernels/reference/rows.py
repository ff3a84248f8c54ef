"""Operations on rows of activations."""

from __future__ import annotations

from typing import overload

import torch
import torch.nn.functional as F
from torch import Tensor

from moonpool.kernels.reference.precision import wide


@overload
def rms_norm(x: Tensor, weight: Tensor, eps: float, *, residual: None = None) -> Tensor: ...
@overload
def rms_norm(x: Tensor, weight: Tensor, eps: float, *, residual: Tensor) -> tuple[Tensor, Tensor]: ...
def rms_norm(
    x: Tensor, weight: Tensor, eps: float, *, residual: Tensor | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    """x: [n, hidden]; weight: [hidden]; residual: [n, hidden].

    Returns the normed x, or with a residual ``(normed(x + residual), x + residual)``; the sum is rounded to
    the dtype of x before it is normed, as it is when it travels on to the next layer.
    """
    total = x if residual is None else (wide(x) + wide(residual)).to(x.dtype)
    values = wide(total)
    scale = torch.rsqrt(values.square().mean(-1, keepdim=True) + eps)
    normed = (values * scale * wide(weight)).to(x.dtype)
    return normed if residual is None else (normed, total)


def silu_mul(gate_up: Tensor) -> Tensor:
    """gate_up: [n, 2 * inter], gate first. Returns silu(gate) * up: [n, inter]."""
    gate, up = wide(gate_up).chunk(2, dim=-1)
    return (F.silu(gate) * up).to(gate_up.dtype)


def argmax_rows(logits: Tensor) -> Tensor:
    """logits: [n, vocab]. Returns int64 [n]; the first of equal values wins, and a NaN beats every number."""
    return logits.argmax(-1)
