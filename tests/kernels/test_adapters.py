"""LoRA adapters in one batch, each row its own."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moonpool import kernels
from tests.kernels.paged import assert_near


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@settings(max_examples=20, deadline=None)
@given(
    ids=st.lists(st.integers(-1, 3), min_size=1, max_size=12), rank=st.integers(1, 9), seed=st.integers(0, 99)
)
def test_each_row_gets_its_own_adapter(dtype: torch.dtype, ids: list[int], rank: int, seed: int) -> None:
    torch.manual_seed(seed)
    x, y = torch.randn(len(ids), 24).to(dtype), torch.randn(len(ids), 17).to(dtype)
    a, b = torch.randn(4, rank, 24).to(dtype), torch.randn(4, 17, rank).to(dtype)
    scales = torch.rand(4)
    expected = y.double()
    for row, adapter in enumerate(ids):
        if adapter >= 0:
            expected[row] += scales[adapter] * (b[adapter].double() @ (a[adapter].double() @ x[row].double()))
    unchanged = y.clone()
    kernels.add_lora(y, x, a, b, torch.tensor(ids, dtype=torch.int32), scales)
    assert_near(y, expected, dtype, factor=4)
    without = torch.tensor(ids) < 0
    assert torch.equal(y[without], unchanged[without])


def test_a_smaller_adapter_is_padded_with_zeros() -> None:
    x = torch.randn(2, 8)
    a, b = torch.randn(1, 4, 8), torch.randn(1, 6, 4)
    a[:, 2:], b[:, :, 2:] = 0, 0
    y = torch.zeros(2, 6)
    kernels.add_lora(y, x, a, b, torch.zeros(2, dtype=torch.int32), torch.ones(1))
    assert_near(y, (x @ a[0, :2].T) @ b[0, :, :2].T, torch.float32, factor=4)
