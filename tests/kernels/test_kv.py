"""Rotation and writes of K and V into the pool."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from torch import Tensor

from tests.kernels.paged import assert_near

HEADS, KV_HEADS = 6, 2


def empty_pool(head_dim: int, dtype: torch.dtype) -> Tensor:
    return torch.full((7, 3, 2, KV_HEADS, 8, head_dim), float("nan"), dtype=dtype)


def expected_rotation(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x: float64 [n, heads, head_dim]; cos, sin: [n, half]. One pair of dimensions at a time, as a complex
    product."""
    half = cos.shape[1]
    turn = torch.complex(cos.double(), sin.double())[:, None]
    turned = torch.complex(x[..., :half], x[..., half : 2 * half]) * turn
    return torch.cat((turned.real, turned.imag, x[..., 2 * half :]), -1)


def expected_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight.double()


@pytest.mark.parametrize(("head_dim", "half"), [(32, 16), (64, 32), (64, 8), (40, 20), (128, 64), (6, 3)])
@pytest.mark.parametrize("normed", [False, True])
def test_rotate_and_write(
    form: ModuleType, dtype: torch.dtype, head_dim: int, half: int, normed: bool
) -> None:
    n = 11
    pool = empty_pool(head_dim, dtype)
    qkv = torch.randn(n, (HEADS + 2 * KV_HEADS) * head_dim).to(dtype)
    angles = torch.rand(50, half) * 7
    positions = torch.randint(0, 50, (n,))
    slots = torch.randperm(7 * 8)[:n]
    slots[4] = -1
    norms = torch.randn(2, head_dim).to(dtype) if normed else None
    q = form.rotate_and_write(
        qkv,
        positions,
        angles.cos(),
        angles.sin(),
        pool,
        1,
        slots,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=head_dim,
        q_norm=None if norms is None else norms[0],
        k_norm=None if norms is None else norms[1],
    )
    heads = qkv.double().view(n, -1, head_dim)
    want_q, want_k, want_v = (
        heads[:, :HEADS],
        heads[:, HEADS : HEADS + KV_HEADS],
        heads[:, HEADS + KV_HEADS :],
    )
    if norms is not None:
        want_q, want_k = expected_norm(want_q, norms[0]), expected_norm(want_k, norms[1])
    cos, sin = angles.cos()[positions], angles.sin()[positions]
    assert_near(q, expected_rotation(want_q, cos, sin), dtype)
    kept = slots >= 0
    blocks, offsets = slots[kept] // 8, slots[kept] % 8
    assert_near(pool[blocks, 1, 0, :, offsets], expected_rotation(want_k, cos, sin)[kept], dtype)
    assert torch.equal(pool[blocks, 1, 1, :, offsets].double(), want_v[kept])
    # Nothing else was touched.
    assert int((~pool.isnan()).sum()) == 2 * int(kept.sum()) * KV_HEADS * head_dim


def test_rotate_and_write_without_queries(form: ModuleType, dtype: torch.dtype) -> None:
    """A rank writes K and V that another one computed."""
    qkv, k_norm = torch.randn(9, (HEADS + 2 * KV_HEADS) * 32).to(dtype), torch.randn(32).to(dtype)
    angles, positions, slots = torch.rand(50, 16) * 7, torch.randint(0, 50, (9,)), torch.randperm(7 * 8)[:9]
    pools = empty_pool(32, dtype), empty_pool(32, dtype)
    for pool, rows, num_heads in zip(
        pools, (qkv, qkv[:, HEADS * 32 :].contiguous()), (HEADS, 0), strict=True
    ):
        q = form.rotate_and_write(
            rows,
            positions,
            angles.cos(),
            angles.sin(),
            pool,
            1,
            slots,
            num_heads=num_heads,
            num_kv_heads=KV_HEADS,
            head_dim=32,
            k_norm=k_norm,
        )
        assert q.shape == (9, num_heads, 32)
    assert torch.equal(pools[0].nan_to_num(), pools[1].nan_to_num())


@pytest.mark.parametrize("head_dim", [32, 40])
def test_write_kv(form: ModuleType, dtype: torch.dtype, head_dim: int) -> None:
    pool = empty_pool(head_dim, dtype)
    k, v = torch.randn(2, 9, KV_HEADS, head_dim).to(dtype).unbind(0)
    slots = torch.randperm(7 * 8)[:9]
    slots[0] = slots[7] = -1
    form.write_kv(k, v, pool, 2, slots)
    kept = slots >= 0
    blocks, offsets = slots[kept] // 8, slots[kept] % 8
    assert torch.equal(pool[blocks, 2, 0, :, offsets], k[kept])
    assert torch.equal(pool[blocks, 2, 1, :, offsets], v[kept])
    assert int((~pool.isnan()).sum()) == 2 * int(kept.sum()) * KV_HEADS * head_dim


def test_write_kv_into_another_dtype(form: ModuleType) -> None:
    pool = empty_pool(32, torch.bfloat16)
    k, v = torch.randn(2, 3, KV_HEADS, 32).unbind(0)
    form.write_kv(k, v, pool, 0, torch.tensor([0, 9, 18]))
    assert torch.equal(pool[1, 0, 0, :, 1], k[1].bfloat16())


def test_write_kv_of_views(form: ModuleType) -> None:
    """k and v as slices of one fused projection."""
    pool = empty_pool(32, torch.float32)
    both = torch.randn(3, 2 * KV_HEADS, 32)
    form.write_kv(both[:, :KV_HEADS], both[:, KV_HEADS:], pool, 0, torch.tensor([0, 9, 18]))
    assert torch.equal(pool[2, 0, 1, :, 2], both[2, KV_HEADS:])
