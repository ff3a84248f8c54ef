"""Pools of int8 with a scale for each token and head: stored values, their error, and attention."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moonpool.kernels import reference
from moonpool.kernels.reference import FP8, codes_and_scales, to_codes
from tests.kernels.attending import decode, prefill
from tests.kernels.paged import PagedBatch, Shape, assert_near

DECODES = ((1, 1), (1, 15), (1, 16), (1, 17), (1, 300))


def pool_of(num_blocks: int, head_dim: int, block_size: int = 8) -> torch.Tensor:
    pool = torch.full((num_blocks, 2, 2, 2, block_size, head_dim + 4), 77, dtype=torch.int8)
    codes_and_scales(pool)[1].fill_(float("nan"))
    return pool


@pytest.mark.parametrize("head_dim", [32, 40, 64, 128, 256])
def test_attention(form: ModuleType, dtype: torch.dtype, head_dim: int) -> None:
    batch = PagedBatch(Shape(DECODES, head_dim=head_dim, dtype=dtype, kv_dtype=torch.int8))
    assert_near(decode(form, batch), batch.expected(), dtype)
    lens = ((3, 3), (20, 85), (1, 40))
    batch = PagedBatch(Shape(lens, head_dim=head_dim, dtype=dtype, window=33, kv_dtype=torch.int8))
    assert_near(prefill(form, batch), batch.expected(), dtype)


@pytest.mark.parametrize("block_size", [8, 16, 256])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(2, 2), (7, 1), (6, 2)])
def test_blocks_and_groups(form: ModuleType, block_size: int, num_heads: int, num_kv_heads: int) -> None:
    shape = Shape(
        ((1, 5), (1, 257), (1, 600)),
        block_size=block_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        soft_cap=3.0,
        kv_dtype=torch.int8,
    )
    batch = PagedBatch(shape)
    lse = torch.empty(batch.q.shape[:2])
    out, expected_lse = decode(form, batch, lse=lse), batch.expected_states()[1]
    assert_near(out, batch.expected(), torch.float32)
    assert_near(lse, expected_lse, torch.float32, factor=4)


def test_a_few_queries(form: ModuleType) -> None:
    batch = PagedBatch(Shape(((4, 20), (4, 130)), kv_dtype=torch.int8))
    out = decode(form, batch, q=batch.q.view(2, 4, 4, 32))
    assert_near(out.flatten(0, 1), batch.expected(), torch.float32)


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_no_value_is_off_by_more_than_half_a_step(form: ModuleType, data: st.DataObject) -> None:
    """A step is 1/127 of the largest value of its token and head, whatever the other tokens are."""
    head_dim, n = 4 * data.draw(st.integers(1, 33)), data.draw(st.integers(1, 20))
    torch.manual_seed(data.draw(st.integers(0, 99)))
    exponents = torch.randint(-20, 20, (2, n, 2, 1)).float()
    k, v = torch.randn(2, n, 2, head_dim) * 2**exponents
    pool, slots = pool_of(3, head_dim), torch.randperm(24)[:n]
    form.write_kv(k, v, pool, 1, slots)
    codes, scales = codes_and_scales(pool)
    for component, wanted in enumerate((k, v)):
        found = (codes.float() * scales[..., None])[slots // 8, 1, component, :, slots % 8]
        step = wanted.abs().amax(-1, keepdim=True) / 127
        assert ((found - wanted).abs() <= step * 0.50001).all()
    untouched = torch.ones(3, 8, dtype=torch.bool)
    untouched[slots // 8, slots % 8] = False
    assert scales[:, 1].permute(0, 3, 1, 2)[untouched].isnan().all()
    assert scales[:, 0].isnan().all()


def test_both_forms_store_the_same_scales_and_codes(form: ModuleType, dtype: torch.dtype) -> None:
    k, v = torch.randn(2, 9, 2, 40).to(dtype)
    k[2], v[3, 0, 7] = 0.0, 1e-33
    slots = torch.randperm(24)[:9]
    slots[4] = -1
    found, wanted = pool_of(3, 40), pool_of(3, 40)
    form.write_kv(k, v, found, 0, slots)
    reference.write_kv(k, v, wanted, 0, slots)
    (codes, scales), (other_codes, other_scales) = codes_and_scales(found), codes_and_scales(wanted)
    assert torch.equal(scales.view(torch.int32), other_scales.view(torch.int32))
    # A value on the edge between two codes may fall to either side.
    assert ((codes.int() - other_codes.int()).abs() <= 1).all()
    assert codes[:, 1].eq(77).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_no_number_is_not_hidden(form: ModuleType, bad: float) -> None:
    v = torch.ones(3, 2, 32)
    v[1, 0, 5] = bad
    pool = pool_of(1, 32)
    form.write_kv(torch.ones(3, 2, 32), v, pool, 0, torch.arange(3))
    table, lens = torch.zeros(1, 1, dtype=torch.int32), torch.tensor([3], dtype=torch.int32)
    out = form.paged_decode_attention(torch.ones(1, 2, 32), pool, 0, table, lens, scale=1.0)
    assert out[0, 0].isnan().all()
    assert torch.allclose(out[0, 1], torch.ones(32), atol=1e-3)


def test_rotation_norm_and_codes_in_one(form: ModuleType, dtype: torch.dtype) -> None:
    n, head_dim = 9, 40
    qkv, angles = torch.randn(n, 6 * head_dim).to(dtype), torch.rand(20, head_dim // 2)
    slots, positions = torch.randperm(24)[:n], torch.randint(0, 20, (n,))
    slots[3] = -1
    norms = torch.randn(2, head_dim).to(dtype)
    numbers = []
    for which in (form, reference):
        pool = pool_of(3, head_dim)
        q = which.rotate_and_write(
            qkv, positions, angles.cos(), angles.sin(), pool, 1, slots, num_heads=2, num_kv_heads=2,
            head_dim=head_dim, q_norm=norms[0], k_norm=norms[1],
        )  # fmt: skip
        codes, scales = codes_and_scales(pool)
        numbers.append((q, codes.float() * scales[..., None], scales))
    (q, found, _), (expected, wanted, scales) = numbers
    assert_near(q, expected.double(), dtype)
    assert torch.equal(found.isnan(), wanted.isnan())
    # A value on the edge between two codes may fall to either side.
    off = (found - wanted).nan_to_num().abs()
    assert (off <= 1.01 * scales.nan_to_num()[..., None]).all()
    assert (off > 0.01 * scales.nan_to_num()[..., None]).float().mean() < 0.005


def test_attention_is_nearer_to_bf16_than_with_float8() -> None:
    """The bounds that docs/decisions/weights.md gives, of the largest result; keys of normal distribution."""
    torch.manual_seed(0)
    k, v = torch.randn(2, 512, 2, 64)
    q = torch.randn(1, 8, 64)
    table, lens = torch.arange(64, dtype=torch.int32)[None], torch.tensor([512], dtype=torch.int32)

    def attended(pool: torch.Tensor, **scales: float) -> torch.Tensor:
        asked = q.to(pool.dtype) if pool.dtype == torch.bfloat16 else q
        there = (k.to(asked.dtype), v.to(asked.dtype))
        reference.write_kv(*there, pool, 0, torch.arange(512), **scales)
        return reference.paged_decode_attention(asked, pool, 0, table, lens, scale=0.125, **scales).double()

    exact = attended(torch.zeros(64, 1, 2, 2, 8, 64))
    pools = {
        "bf16": (torch.zeros(64, 1, 2, 2, 8, 64, dtype=torch.bfloat16), {}),
        "int8": (torch.zeros(64, 1, 2, 2, 8, 68, dtype=torch.int8), {}),
        "fp8": (torch.zeros(64, 1, 2, 2, 8, 64).to(FP8), {"k_scale": 0.02, "v_scale": 0.02}),
    }
    largest = exact.abs().max()
    off = {name: float((attended(p, **s) - exact).abs().max() / largest) for name, (p, s) in pools.items()}
    assert off["bf16"] < 0.01
    assert off["int8"] < 0.02
    assert off["fp8"] < 0.08
    assert off["int8"] < off["fp8"]


def test_codes_of_nothing_and_of_one_value() -> None:
    codes, scales = to_codes(torch.tensor([[0.0, 0.0], [-3.0, 1.5]]))
    assert scales.tolist() == [0.0, pytest.approx(3 / 127)]
    assert codes.tolist() == [[0, 0], [-127, 64]]
