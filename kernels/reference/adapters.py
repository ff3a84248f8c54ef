"""LoRA adapters, several in one batch."""

from __future__ import annotations

import torch
from torch import Tensor

from moonpool.kernels.reference.dtypes import to_compute_dtype


def add_lora(y: Tensor, x: Tensor, a: Tensor, b: Tensor, adapter_ids: Tensor, scales: Tensor) -> None:
    """Add the adapter of each row: y[i] += scales[j] * b[j] @ (a[j] @ x[i]) with j = adapter_ids[i].

    An adapter id of -1 adds nothing. y: [n, out], changed in place; x: [n, in]; a: [adapters, rank, in]; b:
    [adapters, out, rank]; adapter_ids: int32 [n]; scales: float32 [adapters] (alpha / rank). An adapter of
    smaller rank is padded with zeros.
    """
    # Sort rows by adapter, those without one first: one gather and one scatter serve all adapters.
    order = adapter_ids.argsort(stable=True)
    counts = torch.bincount(adapter_ids + 1, minlength=a.shape[0] + 1).tolist()
    rows, sums = to_compute_dtype(x[order]), to_compute_dtype(y[order])
    end = counts[0]
    for adapter, count in enumerate(counts[1:]):
        start, end = end, end + count
        if count:
            low = rows[start:end] @ to_compute_dtype(a[adapter]).T * scales[adapter]
            sums[start:end].addmm_(low, to_compute_dtype(b[adapter]).T)
    y[order] = sums.to(y.dtype)
