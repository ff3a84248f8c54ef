"""Attention of chunks of prompts; random shapes, any strides, offsets beyond 32 bits."""

from __future__ import annotations

import mmap
import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from moonpool.kernels import reference
from moonpool.kernels.reference import FP8
from moonpool.kernels.triton import decode as triton_decode
from moonpool.kernels.triton import kv as triton_kv
from moonpool.kernels.triton import merge as triton_merge
from moonpool.kernels.triton import prefill as triton_prefill
from tests.kernels.attending import decode, prefill
from tests.kernels.interpreted.shapes import CHUNKS, VARIANTS, assert_states
from tests.kernels.paged import PagedBatch, Shape, assert_near
from tests.kernels.triton_device import DEVICE, INTERPRETED


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_prefill(variant: dict[str, Any]) -> None:
    batch = PagedBatch(replace(CHUNKS, **variant), device=DEVICE)
    lse = torch.full(batch.q.shape[:2], float("nan"))
    assert_states(batch, prefill(triton_prefill, batch, lse=lse), lse)


def test_parts_merge_to_the_whole() -> None:
    batch = PagedBatch(Shape(((3, 70), (20, 130), (1, 9))), device=DEVICE)
    first_query = batch.context_lens - (batch.cu_seqlens_q[1:] - batch.cu_seqlens_q[:-1])
    outs, lses = torch.empty(2, *batch.q.shape), torch.empty(2, *batch.q.shape[:2])
    for i, (begin, end) in enumerate(((0, 3), (3, batch.block_table.shape[1]))):
        prefill(
            triton_prefill,
            batch,
            block_table=batch.block_table[:, begin:end].contiguous(),
            context_lens=(batch.context_lens - begin * 16).clamp(0, (end - begin) * 16),
            q_positions=first_query - begin * 16,
            out=outs[i],
            lse=lses[i],
        )
    merged, lse = triton_merge.merge_attention_states(outs, lses)
    assert_states(batch, merged, lse)


def test_more_heads_than_rows() -> None:
    batch = PagedBatch(Shape(((3, 20), (2, 2)), num_heads=40, num_kv_heads=1), device=DEVICE)
    out = triton_prefill.paged_prefill_attention(
        batch.q, batch.pool, 1, batch.block_table, batch.cu_seqlens_q, batch.context_lens, **batch.rules
    )  # fmt: skip
    assert_near(out, batch.expected(), torch.float32, factor=2)


@pytest.mark.parametrize("lens", [[1], [3, 4], [128, 1, 1, 200, 0, 0, 31], [0, 0, 1], [1] * 9])
def test_every_token_has_exactly_one_tile(lens: list[int]) -> None:
    """The numbering behind sequence_of: sequence i has the tiles from starts[i] // T + i on."""
    tokens = 16
    starts = [sum(lens[:i]) for i in range(len(lens) + 1)]
    covered = []
    for tile in range(starts[-1] // tokens + len(lens)):
        sequence = max(i for i in range(len(lens)) if starts[i] // tokens + i <= tile)
        first = (tile - (starts[sequence] // tokens + sequence)) * tokens
        covered += [(sequence, t) for t in range(first, min(first + tokens, lens[sequence]))]
    assert sorted(covered) == [(i, t) for i, n in enumerate(lens) for t in range(n)]


def any_shape(chance: random.Random) -> Shape:
    """A random shape, without hypothesis, which GPU machines may lack."""
    kv_heads, lens = chance.randint(1, 2), [chance.randint(1, 100) for _ in range(chance.randint(1, 3))]
    fp8: dict[str, Any] = {"kv_dtype": FP8, "k_scale": 0.05, "v_scale": 0.02}
    return Shape(
        tuple((chance.randint(1, min(40, total)), total) for total in lens),
        num_heads=chance.randint(1, 9) * kv_heads,
        num_kv_heads=kv_heads,
        head_dim=chance.choice([32, 64, 80, 256]),
        block_size=chance.choice([8, 16, 32, 64, 256, 512]),
        window=chance.choice([0, chance.randint(1, 60)]),
        soft_cap=chance.choice([0.0, 5.0]),
        dtype=torch.float16,
        **(fp8 if chance.random() < 0.5 else {}),
    )


@pytest.mark.parametrize("seed", range(8 if INTERPRETED else 100))
def test_any_shape(seed: int) -> None:
    chance = random.Random(seed)
    shape, num_programs = any_shape(chance), chance.randint(1, 12)
    batch = PagedBatch(shape, device=DEVICE)
    lse = torch.full(batch.q.shape[:2], float("nan"))
    assert_states(batch, prefill(triton_prefill, batch, lse=lse), lse)
    batch = PagedBatch(replace(shape, lens=tuple((1, total) for _, total in shape.lens)), device=DEVICE)
    lse = torch.full(batch.q.shape[:2], float("nan"))
    assert_states(batch, decode(triton_decode, batch, num_programs=num_programs, lse=lse), lse)


def test_a_pool_with_any_strides() -> None:
    """A pool of another layout, permuted; and the ``out`` argument."""
    batch = PagedBatch(replace(CHUNKS, lens=((5, 20), (20, 50))), device=DEVICE)
    batch.pool = batch.pool.permute(1, 2, 0, 3, 4, 5).contiguous().permute(2, 0, 1, 3, 4, 5)
    assert not batch.pool.is_contiguous()
    out = torch.full_like(batch.q, float("nan"))
    assert prefill(triton_prefill, batch, out=out) is out
    assert_near(out, batch.expected(), torch.float32, factor=2)


def test_offsets_beyond_32_bits() -> None:
    """The last blocks of a pool of more than 2^31 elements, in sparse memory."""
    if INTERPRETED:
        memory = mmap.mmap(-1, (1 << 31) + (4 << 20), flags=mmap.MAP_PRIVATE)
        pool = torch.frombuffer(memory, dtype=FP8).view(-1, 1, 2, 2, 16, 64)
    else:
        pool = torch.zeros((1 << 31) // 4096 + 1024, 1, 2, 2, 16, 64).to(FP8)
    ids = [len(pool) - 1, 3, len(pool) - 500]
    n = 40
    slots = (torch.tensor(ids)[:, None] * 16 + torch.arange(16)).flatten()[:n]
    k, v = torch.randn(2, n, 2, 64).half().unbind(0)
    scales = {"k_scale": 0.02, "v_scale": 0.02}
    triton_kv.write_kv(k, v, pool, 0, slots, **scales)
    small = torch.zeros(3, 1, 2, 2, 16, 64).to(FP8)
    reference.write_kv(k, v, small, 0, torch.arange(n), **scales)
    table = torch.tensor([ids], dtype=torch.int32)
    near, lens = torch.arange(3, dtype=torch.int32)[None], torch.tensor([n], dtype=torch.int32)
    q = torch.randn(1, 4, 64).half()
    found = triton_decode.paged_decode_attention(q, pool, 0, table, lens, scale=0.1, **scales)
    expected = reference.paged_decode_attention(q.double(), small, 0, near, lens, scale=0.1, **scales)
    assert_near(found, expected, torch.float16, factor=2)
    starts = torch.tensor([0, 1], dtype=torch.int32)
    found = triton_prefill.paged_prefill_attention(q, pool, 0, table, starts, lens, scale=0.1, **scales)
    assert_near(found, expected, torch.float16, factor=2)
