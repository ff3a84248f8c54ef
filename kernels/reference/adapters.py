"""LoRA adapters: many of them in one batch."""

from __future__ import annotations

import torch
from torch import Tensor

from moonpool.kernels.reference.precision import wide


def add_lora(y: Tensor, x: Tensor, a: Tensor, b: Tensor, adapter_ids: Tensor, scales: Tensor) -> None:
    """Add each row's adapter: y[i] += scales[j] * b[j] @ (a[j] @ x[i]) with j = adapter_ids[i]; none where
    it is -1.

    y: [n, out], changed in place; x: [n, in]; a: [adapters, rank, in]; b: [adapters, out, rank]; adapter_ids:
    int32 [n]; scales: float32 [adapters] (alpha / rank). An adapter of smaller rank is padded with zeros.
    """
    # Rows of one adapter side by side, those without any first: one gather and one scatter for all adapters.
    order = adapter_ids.argsort(stable=True)
    counts = torch.bincount(adapter_ids + 1, minlength=a.shape[0] + 1).tolist()
    rows, sums = wide(x[order]), wide(y[order])
    end = counts[0]
    for adapter, count in enumerate(counts[1:]):
        start, end = end, end + count
        if count:
            low = rows[start:end] @ wide(a[adapter]).T * scales[adapter]
            sums[start:end].addmm_(low, wide(b[adapter]).T)
    y[order] = sums.to(y.dtype)
