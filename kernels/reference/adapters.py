"""LoRA adapters, several in one batch."""

from __future__ import annotations

import torch
from torch import Tensor

from moonpool.kernels.reference.dtypes import to_compute_dtype


def add_lora(
    y: Tensor, x: Tensor, a: Tensor, b: Tensor, adapter_ids: Tensor, extents: Tensor, max_rank: int
) -> None:
    """Add the adapter of each row: y[i] += (x[i] @ a[rows].T) @ b[rows] with the rows of adapter_ids[i].

    y: [n, out], changed in place; its rows may be parts of longer ones. x: [n, in]; a: [rows, in] and b:
    [rows, out], the matrices of all adapters, one row for each of their ranks, scaled already. adapter_ids:
    int32 [n]; -1 adds nothing. extents: int32 [adapters, 2], first row and rank of each; max_rank: the
    largest of these ranks.
    """
    # Sort rows by adapter, those without one first: one gather and one scatter serve all adapters.
    order = adapter_ids.argsort(stable=True)
    counts = torch.bincount(adapter_ids + 1, minlength=len(extents) + 1).tolist()
    rows, sums = to_compute_dtype(x[order]), to_compute_dtype(y[order])
    end = counts[0]
    for (first, rank), count in zip(extents.tolist(), counts[1:], strict=True):
        start, end = end, end + count
        if count:
            low = rows[start:end] @ to_compute_dtype(a[first : first + rank]).T
            sums[start:end].addmm_(low, to_compute_dtype(b[first : first + rank]))
    y[order] = sums.to(y.dtype)
