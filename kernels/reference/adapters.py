"""LoRA adapters: many of them in one batch."""

from __future__ import annotations

from torch import Tensor

from kernels.reference.wide import wide


def add_lora(y: Tensor, x: Tensor, a: Tensor, b: Tensor, adapter_ids: Tensor, scales: Tensor) -> None:
    """Add each row's adapter: y[i] += scales[j] * b[j] @ (a[j] @ x[i]) with j = adapter_ids[i]; none where
    it is -1.

    y: [n, out], changed in place; x: [n, in]; a: [adapters, rank, in]; b: [adapters, out, rank]; adapter_ids:
    int32 [n]; scales: float32 [adapters] (alpha / rank). An adapter of smaller rank is padded with zeros.
    """
    for adapter in sorted(set(adapter_ids.tolist())):
        if adapter >= 0:
            chosen = adapter_ids == adapter
            low = wide(x[chosen]) @ wide(a[adapter]).T
            delta = low @ wide(b[adapter]).T * scales[adapter]
            y[chosen] = (wide(y[chosen]) + delta).to(y.dtype)
