"""Norms, activations, writes to the pool, merged states, checksums."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from moonpool.kernels import reference
from moonpool.kernels.reference import FP8
from moonpool.kernels.triton import checksums as triton_checksums
from moonpool.kernels.triton import kv as triton_kv
from moonpool.kernels.triton import merge as triton_merge
from moonpool.kernels.triton import rows as triton_rows
from moonpool.transfer import checksum
from tests.kernels.numbers8 import between
from tests.kernels.paged import assert_near


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


@pytest.mark.parametrize(
    "sizes",
    [
        [248, 256, 1016, 1024, 1032],
        [2048, 2048 + 64, 4096 + 8, 17 * 1024],
        [40 * 1024],
        [16, 512],  # a short one
        [300, 512],  # not of whole words
    ],
    ids=str,
)
def test_checksums_are_those_of_the_host(sizes: list[int]) -> None:
    nbytes = torch.tensor(sizes, dtype=torch.int64, device="cpu")
    offsets = (nbytes.cumsum(0) - nbytes) // 8 * 8 + 16
    memory = torch.randint(0, 256, (int(nbytes.sum()) + 64,), dtype=torch.uint8)
    found = triton_checksums.checksum_spans(memory, offsets, nbytes)
    assert torch.equal(found, reference.checksum_spans(memory, offsets, nbytes))
    host = memory.cpu().numpy()
    assert [int(value) & (1 << 64) - 1 for value in found] == [
        checksum(host[begin : begin + size].data) for begin, size in zip(offsets.tolist(), sizes, strict=True)
    ]
