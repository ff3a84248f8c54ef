"""Pools of more than 2^31 elements, in sparse memory."""

from __future__ import annotations

import mmap
from types import ModuleType

import pytest
import torch
from torch import Tensor

from moonpool.kernels import reference
from moonpool.kernels.reference import FP8
from tests.kernels.paged import assert_near

HEADS, SIZE, DIM = 2, 16, 64
BLOCK = 2 * HEADS * SIZE * DIM  # elements
NUM_BLOCKS = (1 << 31) // BLOCK + 1000


def large_pool(dtype: torch.dtype) -> Tensor:
    memory = mmap.mmap(-1, NUM_BLOCKS * BLOCK * dtype.itemsize, flags=mmap.MAP_PRIVATE)
    pool = torch.frombuffer(memory, dtype=dtype).view(NUM_BLOCKS, 1, 2, HEADS, SIZE, DIM)
    assert pool.numel() > 1 << 31
    return pool


@pytest.mark.parametrize("dtype", [FP8, torch.float16], ids=str)
def test_the_last_blocks_are_reached(form: ModuleType, dtype: torch.dtype) -> None:
    """Writes and attention beyond the range of 32-bit offsets."""
    pool = large_pool(dtype)
    ids = [NUM_BLOCKS - 1, 3, NUM_BLOCKS - 700]
    n = 40
    slots = (torch.tensor(ids)[:, None] * SIZE + torch.arange(SIZE)).flatten()[:n]
    assert (NUM_BLOCKS - 700) * BLOCK > 1 << 31
    k, v = torch.randn(2, n, HEADS, DIM).half().unbind(0)
    scale = 0.02 if dtype == FP8 else 1.0
    scales = {"k_scale": scale, "v_scale": scale}
    form.write_kv(k, v, pool, 0, slots, **scales)
    small = torch.zeros(3, 1, 2, HEADS, SIZE, DIM, dtype=dtype)
    reference.write_kv(k, v, small, 0, torch.arange(n), **scales)
    table, lens = torch.tensor([ids], dtype=torch.int32), torch.tensor([n], dtype=torch.int32)
    q = torch.randn(1, 4, DIM).half()
    near = torch.arange(3, dtype=torch.int32)[None]
    found = form.paged_decode_attention(q, pool, 0, table, lens, scale=0.1, **scales)
    expected = reference.paged_decode_attention(q.double(), small, 0, near, lens, scale=0.1, **scales)
    assert_near(found, expected, torch.float16)
    several = torch.randn(n, 4, DIM).half()
    starts = torch.tensor([0, n], dtype=torch.int32)
    found = form.paged_prefill_attention(several, pool, 0, table, starts, lens, scale=0.1, **scales)
    wide = several.double()
    expected = reference.paged_prefill_attention(wide, small, 0, near, starts, lens, scale=0.1, **scales)
    assert_near(found, expected, torch.float16)


@pytest.mark.slow
def test_contexts_of_a_million_tokens(form: ModuleType) -> None:
    """All blocks but a few are the same block, to save memory."""
    size, n = 512, 1_000_000
    pool = torch.zeros(3, 1, 2, 1, size, 32)
    pool[1] = torch.randn(pool[1].shape) * 0.1
    blocks = -(-n // size)
    table = torch.zeros(1, blocks, dtype=torch.int32)
    table[0, -1], pool[2, :, :, :, n % size :] = 2, float("nan")
    table[0, blocks // 2] = 1
    q, lens = torch.randn(1, 2, 32), torch.tensor([n], dtype=torch.int32)
    found = form.paged_decode_attention(q, pool, 0, table, lens, scale=1.0)
    # Zero keys weigh one each and add nothing.
    scores = (pool[1, 0, 0, 0].double() @ q[0].double().T).exp()
    expected = (scores.T @ pool[1, 0, 1, 0].double()) / (scores.sum(0)[:, None] + n - size)
    assert_near(found[0] * 1e3, expected * 1e3, torch.float32, factor=20)
