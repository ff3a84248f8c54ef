"""Operations on rows of activations."""

from __future__ import annotations

from typing import overload

import torch
import torch.nn.functional as F
from torch import Tensor

from moonpool.kernels.reference.dtypes import to_compute_dtype


@overload
def rms_norm(x: Tensor, weight: Tensor, eps: float, *, residual: None = None) -> Tensor: ...
@overload
def rms_norm(x: Tensor, weight: Tensor, eps: float, *, residual: Tensor) -> tuple[Tensor, Tensor]: ...
def rms_norm(
    x: Tensor, weight: Tensor, eps: float, *, residual: Tensor | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    """RMS norm of x, or with a residual ``(norm(x + residual), x + residual)``.

    x: [n, hidden]; weight: [hidden]; residual: [n, hidden]. The sum is rounded to the dtype of x before the
    norm, so that the norm sees the value that the next layer gets.
    """
    total = x if residual is None else (to_compute_dtype(x) + to_compute_dtype(residual)).to(x.dtype)
    values = to_compute_dtype(total)
    scale = torch.rsqrt(values.square().mean(-1, keepdim=True) + eps)
    normed = (values * scale * to_compute_dtype(weight)).to(x.dtype)
    return normed if residual is None else (normed, total)


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up: [n, inter]. gate_up: [n, 2 * inter], gate first."""
    gate, up = to_compute_dtype(gate_up).chunk(2, dim=-1)
    return (F.silu(gate) * up).to(gate_up.dtype)


def argmax_rows(logits: Tensor) -> Tensor:
    """Index of the largest of each row: int64 [n]. The first of equal values wins; NaN is the largest.

    logits: [n, vocab].
    """
    return logits.argmax(-1)


def forbid_tokens(scores: Tensor, masks: Tensor) -> None:
    """Set the scores of forbidden tokens to -inf, in place.

    scores: [n, vocab]; masks: int32 [n, ceil(vocab / 32)]. Bit i % 32 of word i // 32 is set where token i is
    allowed.
    """
    shifts = torch.arange(32, dtype=torch.int32, device=masks.device)
    allowed = (masks[:, :, None] >> shifts & 1).flatten(1)[:, : scores.shape[1]]
    scores.masked_fill_(allowed == 0, float("-inf"))
