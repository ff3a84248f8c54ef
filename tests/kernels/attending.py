"""Calling a form's attention on a PagedBatch."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from torch import Tensor

from tests.kernels.paged import PagedBatch


def decode(form: ModuleType, batch: PagedBatch, **more: Any) -> Tensor:
    out: Tensor = form.paged_decode_attention(
        more.pop("q", batch.q),
        batch.pool,
        batch.shape.layer,
        batch.block_table,
        more.pop("context_lens", batch.context_lens),
        **(batch.rules | more),
    )
    return out


def prefill(form: ModuleType, batch: PagedBatch, **more: Any) -> Tensor:
    out: Tensor = form.paged_prefill_attention(
        batch.q,
        batch.pool,
        batch.shape.layer,
        more.pop("block_table", batch.block_table),
        batch.cu_seqlens_q,
        more.pop("context_lens", batch.context_lens),
        **(batch.rules | more),
    )
    return out
