"""Matrix products: weights in few bits, experts, adapters."""

from __future__ import annotations

import pytest
import torch

from moonpool.kernels import reference
from moonpool.kernels.reference.quantised import Kind, pack_nibbles
from moonpool.kernels.triton import adapters as triton_adapters
from moonpool.kernels.triton import experts as triton_experts
from moonpool.kernels.triton import quantised as triton_quantised
from tests.kernels.adapter_rows import scattered
from tests.kernels.paged import assert_near
from tests.kernels.test_quantised import random_weight
from tests.kernels.triton_device import DEVICE


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("kind", "ins", "group", "zeros"),
    [
        ("int8", 200, 0, False),
        ("int8", 128, 32, True),
        ("int4", 200, 0, True),
        ("int4", 160, 32, True),
        ("int4", 256, 128, False),
        ("fp8", 200, 0, False),
        ("fp8", 300, 128, False),
        ("int4", 64, 16, True),
    ],
)
def test_weights_in_few_bits(dtype: torch.dtype, kind: Kind, ins: int, group: int, zeros: bool) -> None:
    with torch.device("cpu"):
        weight = random_weight(kind, 70, ins, group, zeros=zeros)
    codes = (pack_nibbles(weight.codes) if kind == "int4" else weight.codes).to(DEVICE)
    offsets = None if weight.zeros is None else weight.zeros.to(DEVICE)
    for rows in (5, 70):
        x = torch.randn(rows, ins).to(dtype)
        found = triton_quantised.quantised_matmul(
            x, codes, weight.scales.to(DEVICE), offsets, kind=kind, group=weight.group
        )
        assert_near(found, x.double().cpu() @ weight.dequantised().double().T, dtype, factor=4)


def test_float8_with_float8_rows_is_near() -> None:
    """As the GPU's scaled product computes; elsewhere torch's own form of it."""
    with torch.device("cpu"):
        weight = random_weight("fp8", 48, 64)
    x = torch.randn(7, 64).bfloat16()
    found = triton_quantised.scaled_matmul(x, weight.codes.to(DEVICE), weight.scales.to(DEVICE))
    plain = weight.dequantised().double()
    off = (found.double().cpu() - x.double().cpu() @ plain.T).abs()
    bound = x.double().cpu().abs() @ plain.abs().T * (2**-4 + 2**-8)
    assert found.dtype is torch.bfloat16
    assert (off <= bound + 1e-3).all()


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
    x, y = torch.randn(5, 200).to(dtype), torch.randn(5, 190).to(dtype)[:, 40:]
    a, b = torch.randn(50, 200).to(dtype), torch.randn(50, 150).to(dtype)
    extents = torch.tensor([[4, 3], [7, 0], [10, 40]], dtype=torch.int32)
    expected = y.double()
    weights, lines = scattered(a.double(), b.double())
    reference.add_lora(expected, x.double(), weights, ids, extents, lines, 40)
    weights, lines = scattered(a, b)
    triton_adapters.add_lora(y, x, weights, ids, extents, lines, 40)
    assert_near(y, expected, dtype, factor=4)
