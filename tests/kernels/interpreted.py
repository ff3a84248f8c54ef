"""The Triton forms against float64: on a GPU, or with TRITON_INTERPRET=1 on the CPU in Triton's interpreter.

test_triton.py runs this file in a process of its own, interpreted; on a machine with a GPU, ``pytest
tests/kernels/interpreted.py`` runs it there. bfloat16 is left out of the interpreter, whose arithmetic in it
is wrong.
"""

from __future__ import annotations

import mmap
import os
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from moonpool.kernels import reference
from moonpool.kernels.reference import FP8
from moonpool.kernels.triton import adapters as triton_adapters
from moonpool.kernels.triton import decode as triton_decode
from moonpool.kernels.triton import experts as triton_experts
from moonpool.kernels.triton import kv as triton_kv
from moonpool.kernels.triton import launch
from moonpool.kernels.triton import merge as triton_merge
from moonpool.kernels.triton import prefill as triton_prefill
from moonpool.kernels.triton import rows as triton_rows
from tests.kernels.attending import decode, prefill
from tests.kernels.numbers8 import between, every_number
from tests.kernels.paged import PagedBatch, Shape, assert_near

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
if not INTERPRETED and not torch.cuda.is_available():
    pytest.skip("no GPU here, and not interpreted", allow_module_level=True)

DECODES = Shape(((1, 1), (1, 16), (1, 17), (1, 150)))
CHUNKS = Shape(((1, 1), (17, 17), (5, 20), (0, 7), (40, 130)))
VARIANTS: list[dict[str, Any]] = [
    {},
    {"window": 20},
    {"soft_cap": 2.0, "dtype": torch.float16},
    {"head_dim": 40, "num_heads": 7, "num_kv_heads": 1},
    {"head_dim": 128, "dtype": torch.float16, "block_size": 64},
    {"block_size": 8, "num_heads": 2, "num_kv_heads": 2, "window": 3},
    {"kv_dtype": FP8, "k_scale": 0.05, "v_scale": 0.02, "dtype": torch.float16},
    {"kv_dtype": FP8, "k_scale": 0.05, "v_scale": 0.02, "head_dim": 40, "block_size": 128, "window": 20},
]
if not INTERPRETED:
    VARIANTS += [{"dtype": torch.bfloat16, "head_dim": dim} for dim in (64, 128, 256)]
    VARIANTS += [
        {"dtype": torch.bfloat16, "head_dim": dim, "kv_dtype": FP8, "k_scale": 0.05, "v_scale": 0.02}
        for dim in (64, 128, 256)
    ]


@pytest.fixture(autouse=True)
def _tensors_are_made_on_the_device() -> Iterator[None]:
    with torch.device(DEVICE):
        yield


def assert_states(batch: PagedBatch, out: Tensor, lse: Tensor) -> None:
    expected, expected_lse = batch.expected_states()
    # Weights of float8 values are rounded to float16 before they are summed, whatever q is.
    narrow = torch.float16 if batch.shape.kv_dtype == FP8 and batch.shape.dtype == torch.float32 else None
    assert_near(out, expected, narrow or batch.shape.dtype, factor=2)
    assert_near(lse, expected_lse, torch.float32, factor=8)


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("num_programs", [1, 6])
def test_decode(variant: dict[str, Any], num_programs: int) -> None:
    batch = PagedBatch(replace(DECODES, **variant), device=DEVICE)
    lse = torch.full(batch.q.shape[:2], float("nan"))
    out = decode(triton_decode, batch, num_programs=num_programs, lse=lse)
    assert_states(batch, out, lse)


@pytest.mark.parametrize("variant", VARIANTS[1:4] + VARIANTS[6:], ids=str)
@pytest.mark.parametrize(("q_len", "num_programs"), [(3, 1), (5, 4)])
def test_decode_of_a_few_queries(variant: dict[str, Any], q_len: int, num_programs: int) -> None:
    totals = (q_len, 17, 300)
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


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_prefill(variant: dict[str, Any]) -> None:
    batch = PagedBatch(replace(CHUNKS, **variant), device=DEVICE)
    lse = torch.full(batch.q.shape[:2], float("nan"))
    assert_states(batch, prefill(triton_prefill, batch, lse=lse), lse)


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("hidden", [1, 64, 100])
def test_rows(dtype: torch.dtype, hidden: int) -> None:
    x, residual = torch.randn(2, 3, hidden).to(dtype).unbind(0)
    weight = torch.randn(hidden).to(dtype)
    assert_near(triton_rows.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5), dtype, 2)
    normed, total = triton_rows.rms_norm(x, weight, 1e-5, residual=residual)
    expected, expected_total = reference.rms_norm(x, weight, 1e-5, residual=residual)
    assert torch.equal(total, expected_total)
    assert_near(normed, expected, dtype, 2)
    gate_up = torch.randn(3, 2 * hidden).to(dtype) * 5
    gate, up = gate_up.double().chunk(2, -1)
    assert_near(triton_rows.silu_mul(gate_up), F.silu(gate) * up, dtype)


@pytest.mark.parametrize(("head_dim", "half"), [(32, 16), (40, 20), (64, 8)])
@pytest.mark.parametrize("normed", ["", "q", "qk"])
def test_rotate_and_write(head_dim: int, half: int, normed: str) -> None:
    pools = [torch.full((4, 2, 2, 2, 8, head_dim), float("nan")) for _ in range(2)]
    qkv, angles = torch.randn(5, 7 * head_dim), torch.rand(20, half)
    slots, positions = torch.tensor([31, -1, 0, 9, 8]), torch.tensor([0, 19, 3, 3, 7])
    norms = torch.randn(2, head_dim)
    q, expected = (
        form.rotate_and_write(
            qkv,
            positions,
            angles.cos(),
            angles.sin(),
            pool,
            1,
            slots,
            num_heads=3,
            num_kv_heads=2,
            head_dim=head_dim,
            q_norm=norms[0] if "q" in normed else None,
            k_norm=norms[1] if "k" in normed else None,
        )
        for form, pool in zip((triton_kv, reference), pools, strict=True)
    )
    assert_near(q, expected, torch.float32)
    assert torch.equal(pools[0].isnan(), pools[1].isnan())
    assert_near(pools[0].nan_to_num(), pools[1].nan_to_num(), torch.float32)


def test_write_kv() -> None:
    pools = [torch.full((4, 2, 2, 3, 8, 20), float("nan")) for _ in range(2)]
    k, v = torch.randn(2, 4, 3, 20).unbind(0)
    for form, pool in zip((triton_kv, reference), pools, strict=True):
        form.write_kv(k, v, pool, 1, torch.tensor([31, -1, 0, 9]))
    assert torch.equal(pools[0].nan_to_num(), pools[1].nan_to_num())


def test_float8_is_rounded_as_the_reference_does() -> None:
    values = between().view(-1, 1, 64)
    n = len(values)
    pools = [torch.zeros(-(-n // 8), 1, 2, 1, 8, 64).to(FP8) for _ in range(2)]
    for form, pool in zip((triton_kv, reference), pools, strict=True):
        form.write_kv(values, values, pool, 0, torch.arange(n), k_scale=1.0, v_scale=0.5)
    found, expected = (pool.float() for pool in pools)
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.nan_to_num(), expected.nan_to_num())


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


def test_rotate_and_write_float8() -> None:
    pools = [torch.zeros(4, 2, 2, 2, 8, 40).to(FP8) for _ in range(2)]
    qkv, angles = torch.randn(5, 7 * 40), torch.rand(20, 16)
    slots, positions = torch.tensor([31, -1, 0, 9, 8]), torch.tensor([0, 19, 3, 3, 7])
    q, expected = (
        form.rotate_and_write(
            qkv, positions, angles.cos(), angles.sin(), pool, 1, slots, num_heads=3, num_kv_heads=2,
            head_dim=40, k_norm=torch.ones(40), k_scale=0.03, v_scale=0.01,
        )
        for form, pool in zip((triton_kv, reference), pools, strict=True)
    )  # fmt: skip
    assert_near(q, expected, torch.float32)
    found, wanted = (pool.float() for pool in pools)
    assert ((found - wanted).abs() <= wanted.abs() / 7).all()
    assert (found != wanted).float().mean() < 0.001


def test_merge_attention_states() -> None:
    outs, lses = torch.randn(5, 4, 2, 24), torch.randn(5, 4, 2) * 5
    outs[3, :2], lses[3, :2] = float("nan"), float("-inf")
    outs[:, 3], lses[:, 3] = float("nan"), float("-inf")
    merged, lse = triton_merge.merge_attention_states(outs, lses)
    expected, expected_lse = reference.merge_attention_states(outs, lses)
    assert_near(merged, expected, torch.float32, 2)
    assert torch.equal(lse.isneginf(), expected_lse.isneginf())
    assert_near(lse[:3], expected_lse[:3], torch.float32, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("offsets", [[0, 3, 3, 40], [0, 0, 0, 1], [0, 70, 70, 90], [0, 5, 9, 12]])
def test_grouped_matmul(dtype: torch.dtype, offsets: list[int]) -> None:
    bounds = torch.tensor(offsets, dtype=torch.int32)
    x, weights = torch.randn(offsets[-1] + 2, 72).to(dtype), torch.randn(3, 70, 72).to(dtype)
    out = triton_experts.grouped_matmul(x, weights, bounds)
    assert_near(out, reference.grouped_matmul(x.double(), weights.double(), bounds), dtype, factor=4)
    assert out[offsets[-1] :].eq(0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_adapters(dtype: torch.dtype) -> None:
    ids = torch.tensor([2, -1, 0, 2, 1], dtype=torch.int32)
    x, y = torch.randn(5, 200).to(dtype), torch.randn(5, 150).to(dtype)
    a, b, scales = torch.randn(3, 6, 200).to(dtype), torch.randn(3, 150, 6).to(dtype), torch.rand(3)
    expected = y.double()
    reference.add_lora(expected, x.double(), a.double(), b.double(), ids, scales)
    triton_adapters.add_lora(y, x, a, b, ids, scales)
    assert_near(y, expected, dtype, factor=4)


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
