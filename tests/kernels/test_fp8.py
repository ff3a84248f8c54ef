"""Float8 pools with scales: stored values and attention."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from moonpool.kernels import reference
from moonpool.kernels.reference import FP8
from tests.kernels.attending import decode, prefill
from tests.kernels.numbers8 import between, every_number
from tests.kernels.paged import PagedBatch, Shape, assert_near

DECODES = ((1, 1), (1, 15), (1, 16), (1, 17), (1, 300))
SCALES = {"kv_dtype": FP8, "k_scale": 0.05, "v_scale": 0.02}


@pytest.mark.parametrize("head_dim", [32, 40, 64, 128, 256])
def test_attention(form: ModuleType, dtype: torch.dtype, head_dim: int) -> None:
    batch = PagedBatch(Shape(DECODES, head_dim=head_dim, dtype=dtype, **SCALES))
    assert batch.pool.dtype == FP8
    assert_near(decode(form, batch), batch.expected(), dtype)
    chunks = Shape(((3, 3), (20, 85), (1, 40)), head_dim=head_dim, dtype=dtype, window=33, **SCALES)
    batch = PagedBatch(chunks)
    assert_near(prefill(form, batch), batch.expected(), dtype)


@pytest.mark.parametrize("block_size", [8, 16, 256])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(2, 2), (7, 1), (6, 2)])
def test_blocks_and_groups(form: ModuleType, block_size: int, num_heads: int, num_kv_heads: int) -> None:
    shape = Shape(
        ((1, 5), (1, 257)),
        block_size=block_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        soft_cap=3.0,
        **SCALES,
    )
    batch = PagedBatch(shape)
    lse = torch.empty(batch.q.shape[:2])
    out, expected_lse = decode(form, batch, lse=lse), batch.expected_states()[1]
    assert_near(out, batch.expected(), torch.float32)
    assert_near(lse, expected_lse, torch.float32, factor=4)


def test_a_few_queries(form: ModuleType) -> None:
    batch = PagedBatch(Shape(((4, 20), (4, 130)), **SCALES))
    out = decode(form, batch, q=batch.q.view(2, 4, 4, 32))
    assert_near(out.flatten(0, 1), batch.expected(), torch.float32)


def test_every_number_is_read_exactly(form: ModuleType) -> None:
    """One key, so that attention gives its value."""
    numbers = every_number()
    pool = torch.zeros(4, 1, 2, 1, 8, 64).to(FP8)
    pool[:, 0, 1, 0, 0] = numbers.view(4, 64)
    q, table = torch.zeros(4, 1, 64), torch.arange(4, dtype=torch.int32)[:, None]
    out = form.paged_decode_attention(
        q, pool, 0, table, torch.ones(4, dtype=torch.int32), scale=1.0, v_scale=2.0
    ).flatten()
    nan = numbers.float().isnan()
    assert nan.sum() == 2
    assert torch.equal(out[~nan], 2 * numbers.float()[~nan])
    # A NaN is not hidden, as in no other dtype.
    assert out[nan].isnan().all()


@pytest.mark.parametrize("head_dim", [64, 4])
def test_every_number_is_rounded_as_torch_does(form: ModuleType, head_dim: int) -> None:
    values = between().view(-1, 1, head_dim)
    n = len(values)
    pool = torch.zeros(-(-n // 8), 1, 2, 1, 8, head_dim).to(FP8)
    form.write_kv(values, values, pool, 0, torch.arange(n), k_scale=1.0, v_scale=0.5)
    for kv, factor in ((0, 1.0), (1, 2.0)):
        stored = pool[:, 0, kv, 0].flatten(0, 1)[:n].float()
        expected = (values[:, 0] * factor).clamp(-448, 448).to(FP8).float()
        assert torch.equal(stored.isnan(), expected.isnan())
        assert torch.equal(stored.nan_to_num(), expected.nan_to_num())


@pytest.mark.parametrize("head_dim", [32, 40])
def test_rotation_norm_and_quantization_in_one(form: ModuleType, dtype: torch.dtype, head_dim: int) -> None:
    n, half = 9, head_dim // 2
    qkv, angles = torch.randn(n, 6 * head_dim).to(dtype), torch.rand(20, half)
    slots, positions = torch.randperm(32)[:n], torch.randint(0, 20, (n,))
    slots[3] = -1
    norms = torch.randn(2, head_dim).to(dtype)
    pools = [torch.full((4, 2, 2, 2, 8, head_dim), float("nan"), dtype=FP8) for _ in range(2)]
    (q, pool), (expected, wanted) = (
        (
            which.rotate_and_write(
                qkv, positions, angles.cos(), angles.sin(), into, 1, slots, num_heads=2, num_kv_heads=2,
                head_dim=head_dim, q_norm=norms[0], k_norm=norms[1], k_scale=0.03, v_scale=0.01,
            ),
            into,
        )
        for which, into in zip((form, reference), pools, strict=True)
    )  # fmt: skip
    assert_near(q, expected.double(), dtype)
    assert torch.equal(pool.float().isnan(), wanted.float().isnan())
    # A value on the edge between two codes may fall to either side.
    mine, theirs = pool.float().nan_to_num(), wanted.float().nan_to_num()
    assert ((mine - theirs).abs() <= theirs.abs() / 7).all()
    assert (mine != theirs).float().mean() < 0.001
