"""LoRA adapters, several in one batch."""

from __future__ import annotations

import torch
from torch import Tensor

from moonpool.kernels.reference.dtypes import to_compute_dtype

LINE_NBYTES = 64
"""Rows of adapters begin at multiples of this, counted from the first byte of their memory."""


def add_lora(
    y: Tensor,
    x: Tensor,
    weights: Tensor,
    adapter_ids: Tensor,
    extents: Tensor,
    lines: Tensor,
    max_rank: int,
) -> None:
    """Add the adapter of each row: y[i] += (x[i] @ a.T) @ b with the rows a and b of adapter_ids[i].

    y: [n, out], changed in place; its rows may be parts of longer ones. x: [n, in]. weights: [values], memory
    with the rows of all adapters, scaled already, each whole and anywhere. adapter_ids: int32 [n]; -1 adds
    nothing. extents: int32 [adapters, 2]: the first row of ``lines`` and the rank of each, which may be 0.
    lines: int32 [rows, 2]: where a row of a and the row of b of the same rank begin in ``weights``, in units
    of LINE_NBYTES. max_rank: the largest of these ranks.
    """
    # Sort rows by adapter, those without one first: one gather and one scatter serve all adapters.
    order = adapter_ids.argsort(stable=True)
    counts = torch.bincount(adapter_ids + 1, minlength=len(extents) + 1).tolist()
    rows, sums = to_compute_dtype(x[order]), to_compute_dtype(y[order])
    begins = lines.long() * (LINE_NBYTES // weights.itemsize)
    end = counts[0]
    for (first, rank), count in zip(extents.tolist(), counts[1:], strict=True):
        start, end = end, end + count
        if count and rank:
            a, b = (
                to_compute_dtype(weights[at[:, None] + torch.arange(width, device=x.device)])
                for at, width in zip(
                    begins[first : first + rank].unbind(1), (x.shape[1], y.shape[1]), strict=True
                )
            )
            sums[start:end].addmm_(rows[start:end] @ a.T, b)
    y[order] = sums.to(y.dtype)
