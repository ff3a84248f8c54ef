"""Attention of one query, or a few, a sequence."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from moonpool.kernels import reference
from moonpool.kernels.reference import FP8
from moonpool.kernels.triton import decode as triton_decode
from moonpool.kernels.triton import launch
from moonpool.kernels.triton import prefill as triton_prefill
from tests.kernels.attending import decode, prefill
from tests.kernels.interpreted.shapes import DECODES, VARIANTS, assert_states
from tests.kernels.numbers8 import every_number
from tests.kernels.paged import PagedBatch, Shape, assert_near
from tests.kernels.triton_device import DEVICE, INTERPRETED


def every_pair(variants: list[dict[str, Any]], others: list[Any]) -> list[tuple[dict[str, Any], Any]]:
    """All pairs on a GPU. In the interpreter, which is slow: each variant with one of ``others``, the first
    with all."""
    return [
        (variant, other)
        for i, variant in enumerate(variants)
        for j, other in enumerate(others)
        if not INTERPRETED or i == 0 or j == i % len(others)
    ]


@pytest.mark.parametrize(("variant", "num_programs"), every_pair(VARIANTS, [1, 6]), ids=str)
def test_decode(variant: dict[str, Any], num_programs: int) -> None:
    batch = PagedBatch(replace(DECODES, **variant), device=DEVICE)
    lse = torch.full(batch.q.shape[:2], float("nan"))
    out = decode(triton_decode, batch, num_programs=num_programs, lse=lse)
    assert_states(batch, out, lse)


@pytest.mark.parametrize(
    ("variant", "queries"), every_pair(VARIANTS[1:4] + VARIANTS[6:], [(3, 1), (5, 4)]), ids=str
)
def test_decode_of_a_few_queries(variant: dict[str, Any], queries: tuple[int, int]) -> None:
    q_len, num_programs = queries
    totals = (q_len, 17, 140 if INTERPRETED else 300)
    batch = PagedBatch(replace(DECODES, lens=tuple((q_len, n) for n in totals), **variant), device=DEVICE)
    q = batch.q.view(len(totals), q_len, *batch.q.shape[1:])
    lse = torch.full(q.shape[:3], float("nan"))
    out = decode(triton_decode, batch, q=q, num_programs=num_programs, lse=lse)
    assert_states(batch, out.flatten(0, 1), lse.flatten(0, 1))


@pytest.mark.parametrize("num_programs", [1, 4])
def test_a_padded_batch_row_gives_zeros(num_programs: int) -> None:
    batch = PagedBatch(Shape(((1, 5), (1, 300))), device=DEVICE)
    batch.context_lens[0] = 0
    batch.block_table[0] = -1
    lse = torch.zeros(2, 4)
    out = decode(triton_decode, batch, num_programs=num_programs, lse=lse)
    assert out[0].eq(0).all()
    assert lse[0].isneginf().all()
    assert not out.isnan().any()


def test_queries_that_see_no_key_or_all_keys() -> None:
    """Positions that differ from the end of the table, as in context parallelism."""
    batch = PagedBatch(Shape(((1, 40), (1, 60)), window=16), device=DEVICE)
    lse = torch.zeros(2, 4)
    out = decode(triton_decode, batch, q_positions=batch.context_lens + 100, lse=lse)
    assert out.eq(0).all()
    assert lse.isneginf().all()
    for lens in (((1, 40), (1, 90)), ((6, 40), (3, 20))):
        batch = PagedBatch(Shape(lens), device=DEVICE)
        attend = decode if lens[0][0] == 1 else prefill
        far = batch.context_lens + 3
        lse, expected_lse = torch.zeros(2, *batch.q.shape[:2]).unbind(0)
        form = triton_decode if attend is decode else triton_prefill
        out = attend(form, batch, q_positions=far, lse=lse)
        expected = attend(reference, batch, q_positions=far, lse=expected_lse)
        assert_near(out, expected.double(), torch.float32, factor=2)
        assert_near(lse, expected_lse.double(), torch.float32, factor=8)


@pytest.mark.parametrize("num_programs", [2, 14])
def test_any_number_of_partitions(num_programs: int) -> None:
    """One long sequence among short ones; the result differs by rounding only."""
    batch = PagedBatch(
        Shape(((1, 3), (1, 900), (1, 64), (1, 257)), num_heads=2, num_kv_heads=1), device=DEVICE
    )
    out = decode(triton_decode, batch, num_programs=num_programs)
    assert_near(out, batch.expected(), torch.float32, factor=2)
    alone = triton_decode.paged_decode_attention(
        batch.q[1:2],
        batch.pool,
        1,
        batch.block_table[1:2],
        batch.context_lens[1:2],
        **batch.rules,
        num_programs=5,
    )
    assert_near(alone, out[1:2].double(), torch.float32, factor=2)


def test_every_float8_is_read_exactly() -> None:
    numbers = every_number()
    pool = torch.zeros(4, 1, 2, 1, 8, 64).to(FP8)
    pool[:, 0, 1, 0, 0] = numbers.view(4, 64)
    q, table = torch.zeros(4, 1, 64), torch.arange(4, dtype=torch.int32)[:, None]
    lens = torch.ones(4, dtype=torch.int32)
    out = triton_decode.paged_decode_attention(q, pool, 0, table, lens, scale=1.0, v_scale=2.0).flatten()
    nan = numbers.float().isnan()
    assert torch.equal(out[~nan], 2 * numbers.float()[~nan])
    assert out[nan].isnan().all()


def test_lengths_and_batches_compile_nothing_new() -> None:
    """Lengths and batch sizes are no constants of the kernels."""
    shape = {"group": 4, "head_dim": 64}
    choice = launch.decode_choice(64, 16, torch.float16, torch.float16, 90)
    decodes = [
        triton_decode.decode_constants(queries=1, batch=n, choice=choice, **shape) for n in (1, 7, 256)
    ]
    assert decodes[0] == decodes[1] == decodes[2]
    chunks = launch.prefill_choice(64, torch.float16, torch.float16, 90)
    prefills = [
        triton_prefill.prefill_constants(batch=n, choice=chunks, block_size=16, **shape) for n in (1, 7, 256)
    ]
    assert prefills[0] == prefills[1] == prefills[2]
