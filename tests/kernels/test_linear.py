"""The linear layer: exact packing, float32 sums, rows that do not depend on each other."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from moonpool.kernels.cpu.library import load
from moonpool.kernels.packed import PackedLinear
from tests.kernels.paged import assert_near


def expected(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    y = x.double() @ weight.double().T
    return y if bias is None else y + bias.double()


@pytest.mark.parametrize("rows", [1, 2, 5, 7, 8, 13, 47, 48, 100])
@pytest.mark.parametrize(("outputs", "inputs"), [(64, 32), (200, 61), (1, 1), (17, 1100), (48, 513)])
def test_linear(dtype: torch.dtype, rows: int, outputs: int, inputs: int) -> None:
    x, weight = torch.randn(rows, inputs).to(dtype), (torch.randn(outputs, inputs) * inputs**-0.5).to(dtype)
    bias = torch.randn(outputs).to(dtype)
    assert_near(PackedLinear(weight)(x), expected(x, weight, None), dtype)
    assert_near(PackedLinear(weight, bias)(x), expected(x, weight, bias), dtype)


@pytest.mark.parametrize("rows", [1, 8, 60])
def test_float32_activations_with_a_narrow_weight(rows: int) -> None:
    x, weight = torch.randn(rows, 333), (torch.randn(90, 333) * 0.05).bfloat16()
    y = PackedLinear(weight, dtype=torch.float32)(x)
    assert y.dtype == torch.float32
    assert_near(y, expected(x, weight, None), torch.float32)


def test_float32_weight_with_bfloat16_values_is_packed_as_bfloat16() -> None:
    weight = torch.randn(64, 64).bfloat16().float()
    linear, wide = PackedLinear(weight), PackedLinear(torch.randn(64, 64))
    if load() is not None:
        assert linear.nbytes == wide.nbytes // 2
    x = torch.randn(3, 64)
    assert_near(linear(x), expected(x, weight, None), torch.float32)


@given(
    st.integers(1, 150), st.integers(1, 70), st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
)
def test_every_weight_is_multiplied_by_its_own_input(outputs: int, inputs: int, dtype: torch.dtype) -> None:
    weight = torch.randn(outputs, inputs).to(dtype)
    assert torch.equal(PackedLinear(weight)(torch.eye(inputs, dtype=dtype)).T, weight)


def test_a_weight_that_is_a_view() -> None:
    weight = torch.randn(40, 80)
    x = torch.randn(2, 40)
    assert_near(PackedLinear(weight[:, ::2])(x), expected(x, weight[:, ::2], None), torch.float32)
    assert_near(PackedLinear(weight.T[:40])(x), expected(x, weight.T[:40], None), torch.float32)


def test_rows_that_are_a_view() -> None:
    x, weight = torch.randn(6, 80), torch.randn(30, 40)
    assert_near(PackedLinear(weight)(x[::2, 40:]), expected(x[::2, 40:], weight, None), torch.float32)


def test_no_rows() -> None:
    assert PackedLinear(torch.randn(30, 40))(torch.empty(0, 40)).shape == (0, 30)


@pytest.mark.skipif(load() is None, reason="no compiler here")
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_a_row_does_not_depend_on_the_others(stored: torch.dtype) -> None:
    """Bit for bit, whatever the number of rows: a request's tokens must not depend on its batch."""
    linear = PackedLinear((torch.randn(200, 1111) * 0.05).to(stored))
    x = torch.randn(130, 1111)
    whole = linear(x)
    for rows in (1, 2, 3, 6, 7, 8, 16, 47, 48, 129):
        assert torch.equal(linear(x[:rows]), whole[:rows])


@pytest.mark.skipif(load() is None, reason="no compiler here")
def test_nan_and_infinity_pass_through() -> None:
    weight = torch.randn(40, 50)
    weight[3, 7] = float("inf")
    weight[5, 7] = float("nan")
    y = PackedLinear(weight)(torch.ones(2, 50))
    assert y[:, 3].isinf().all()
    assert y[:, 5].isnan().all()
    assert y[:, 4].isfinite().all()
