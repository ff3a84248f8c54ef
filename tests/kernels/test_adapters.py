"""LoRA adapters in one batch, each row its own."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moonpool.kernels import dispatch
from tests.kernels.adapter_rows import scattered
from tests.kernels.paged import assert_near


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@settings(max_examples=20, deadline=None)
@given(
    ids=st.lists(st.integers(-1, 3), min_size=1, max_size=12),
    ranks=st.lists(st.integers(0, 9), min_size=4, max_size=4),
    seed=st.integers(0, 99),
)
def test_each_row_gets_its_own_adapter(
    dtype: torch.dtype, ids: list[int], ranks: list[int], seed: int
) -> None:
    torch.manual_seed(seed)
    x, y = torch.randn(len(ids), 24).to(dtype), torch.randn(len(ids), 30).to(dtype)[:, 5:22]
    firsts = [3 + sum(ranks[:i]) for i in range(4)]
    a, b = torch.randn(3 + sum(ranks), 24).to(dtype), torch.randn(3 + sum(ranks), 17).to(dtype)
    extents = torch.tensor([*zip(firsts, ranks, strict=True)], dtype=torch.int32)
    expected = y.double()
    for row, adapter in enumerate(ids):
        if adapter >= 0:
            rows = slice(firsts[adapter], firsts[adapter] + ranks[adapter])
            expected[row] += b[rows].double().T @ (a[rows].double() @ x[row].double())
    unchanged = y.clone()
    weights, lines = scattered(a, b, seed=seed)
    dispatch.add_lora(y, x, weights, torch.tensor(ids, dtype=torch.int32), extents, lines, max(1, *ranks))
    assert_near(y, expected, dtype, factor=4)
    without = torch.tensor(ids) < 0
    assert torch.equal(y[without], unchanged[without])


def test_a_row_does_not_depend_on_the_others() -> None:
    x, y = torch.randn(40, 100), torch.randn(40, 70)
    weights, lines = scattered(torch.randn(12, 100), torch.randn(12, 70))
    extents = torch.tensor([[0, 5], [5, 7]], dtype=torch.int32)
    ids = (torch.arange(40) // 7 % 2).int()
    together, alone = y.clone(), y.clone()
    dispatch.add_lora(together, x, weights, ids, extents, lines, 7)
    for row in range(40):
        one = slice(row, row + 1)
        dispatch.add_lora(alone[one], x[one], weights, ids[one].contiguous(), extents, lines, 7)
    assert torch.equal(together, alone)
