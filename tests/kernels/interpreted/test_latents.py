"""Attention over latents: values that are keys."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from moonpool.kernels.reference import FP8
from moonpool.kernels.triton import decode as triton_decode
from moonpool.kernels.triton import prefill as triton_prefill
from tests.kernels.attending import decode, prefill
from tests.kernels.interpreted.shapes import CHUNKS, DECODES
from tests.kernels.paged import PagedBatch, Shape, assert_near
from tests.kernels.triton_device import DEVICE, INTERPRETED

LATENTS: list[dict[str, Any]] = [
    {"num_heads": 18, "head_dim": 40, "dtype": torch.float16},  # two programs of nine heads
    {"num_heads": 6, "head_dim": 96, "block_size": 64},
    {"num_heads": 16, "head_dim": 40, "kv_dtype": FP8, "k_scale": 0.05, "v_scale": 0.05},
]
if not INTERPRETED:
    LATENTS.append({"num_heads": 128, "head_dim": 576, "dtype": torch.bfloat16, "block_size": 64})


def over_latents(shape: Shape) -> tuple[PagedBatch, int]:
    """A batch whose values are its keys, as a latent's pool, and the elements that only scores use."""
    batch = PagedBatch(replace(shape, num_kv_heads=1), device=DEVICE)
    batch.pool = batch.pool[:, :, :1].expand(-1, -1, 2, -1, -1, -1)
    batch.values = batch.keys
    return batch, {40: 8, 96: 32, 576: 64}[batch.shape.head_dim]


def assert_latents(batch: PagedBatch, key_only: int, out: Tensor, lse: Tensor) -> None:
    expected, expected_lse = batch.expected_states()
    narrow = torch.float16 if batch.shape.kv_dtype == FP8 and batch.shape.dtype == torch.float32 else None
    assert_near(out[..., key_only:], expected[..., key_only:], narrow or batch.shape.dtype, factor=2)
    assert_near(lse, expected_lse, torch.float32, factor=8)


@pytest.mark.parametrize("variant", LATENTS, ids=str)
def test_decode_over_latents(variant: dict[str, Any]) -> None:
    batch, key_only = over_latents(replace(DECODES, lens=((1, 1), (1, 300)), **variant))
    lse = torch.full(batch.q.shape[:2], float("nan"))
    out = decode(triton_decode, batch, num_programs=6, lse=lse, key_only=key_only)
    assert_latents(batch, key_only, out, lse)


@pytest.mark.parametrize("variant", LATENTS, ids=str)
def test_prefill_over_latents(variant: dict[str, Any]) -> None:
    batch, key_only = over_latents(replace(CHUNKS, lens=((1, 1), (5, 20), (0, 7), (3, 40)), **variant))
    lse = torch.full(batch.q.shape[:2], float("nan"))
    out = prefill(triton_prefill, batch, lse=lse, key_only=key_only)
    assert_latents(batch, key_only, out, lse)
