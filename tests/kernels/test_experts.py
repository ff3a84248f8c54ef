"""Mixtures of experts against the dense computation, token by token."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moonpool.kernels import dispatch, reference
from moonpool.kernels.packed import PackedExperts
from tests.kernels.paged import assert_near


def dense(x: Tensor, logits: Tensor, k: int, up: Tensor, *, renormalize: bool) -> Tensor:
    """Every expert computes every token, in float64; experts that are not chosen have weight zero."""
    probabilities = logits.double().softmax(-1)
    kept = torch.zeros_like(probabilities)
    for row, values in enumerate(probabilities.tolist()):
        best = sorted(range(len(values)), key=lambda e: (-values[e], e))[:k]
        kept[row, best] = probabilities[row, best]
    if renormalize:
        kept /= kept.sum(-1, keepdim=True)
    return torch.einsum("ne,eoi,ni->no", kept, up.double(), x.double())


def sparse(x: Tensor, logits: Tensor, k: int, up: Tensor, *, renormalize: bool) -> Tensor:
    weights, ids = dispatch.route_experts(logits, k, renormalize=renormalize)
    order, offsets = dispatch.group_by_expert(ids, logits.shape[1])
    rows = dispatch.grouped_matmul(dispatch.group_rows(x, order, k), up, offsets)
    return dispatch.combine_experts(rows, order, weights)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("renormalize", [True, False])
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_only_the_chosen_experts_compute_and_the_sum_is_the_dense_one(
    dtype: torch.dtype, renormalize: bool, data: st.DataObject
) -> None:
    num_experts = data.draw(st.integers(1, 40))
    k, n = data.draw(st.integers(1, num_experts)), data.draw(st.integers(1, 20))
    torch.manual_seed(data.draw(st.integers(0, 1000)))
    x, up = torch.randn(n, 24).to(dtype), torch.randn(num_experts, 17, 24).to(dtype)
    logits = torch.randn(n, num_experts)
    expected = dense(x, logits, k, up, renormalize=renormalize)
    assert_near(sparse(x, logits, k, up, renormalize=renormalize), expected, dtype, factor=4)


def test_first_of_equal_experts_is_chosen() -> None:
    weights, ids = dispatch.route_experts(torch.zeros(3, 8), 2, renormalize=True)
    assert ids.tolist() == [[0, 1]] * 3
    assert weights.eq(0.5).all()


def test_grouping_keeps_the_order_of_an_experts_tokens() -> None:
    ids = torch.tensor([[2, 0], [2, 1], [0, 2]], dtype=torch.int32)
    order, offsets = dispatch.group_by_expert(ids, 4)
    assert order.tolist() == [1, 4, 3, 0, 2, 5]
    assert offsets.tolist() == [0, 2, 3, 6, 6], "an expert without tokens has an empty run"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize(("num_experts", "k"), [(1, 1), (5, 5), (16, 3), (128, 8)])
def test_every_form_routes_as_the_plain_one(dtype, renormalize, num_experts, k) -> None:
    logits = (4 * torch.randn(50, num_experts)).to(dtype)
    logits[0] = -200.0  # far from 0, and all equal
    weights, ids = dispatch.route_experts(logits, k, renormalize=renormalize)
    expected_weights, expected_ids = reference.route_experts(logits, k, renormalize=renormalize)
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(weights, expected_weights, atol=1e-6, rtol=1e-5)


def test_nan_logits_are_routed_to_existing_experts() -> None:
    """NaN must reach the result and no memory outside."""
    logits = torch.randn(3, 20)
    logits[1] = torch.nan
    logits[2, 4] = torch.nan
    weights, ids = dispatch.route_experts(logits, 4, renormalize=True)
    assert ((ids >= 0) & (ids < 20)).all()
    assert all(len(set(row)) == 4 for row in ids.tolist())
    assert weights[0].isfinite().all()
    assert weights[1:].isnan().all()


def test_rows_beyond_the_last_experts_are_zeros() -> None:
    packed = PackedExperts(torch.randn(2, 70, 64))
    out = packed(torch.randn(9, 64), torch.tensor([0, 3, 7], dtype=torch.int32))
    assert out[:7].any(dim=1).all()
    assert not out[7:].any()


def test_no_tokens() -> None:
    """A rank without tokens in a step."""
    weights, ids = dispatch.route_experts(torch.zeros(0, 4), 2, renormalize=True)
    order, offsets = dispatch.group_by_expert(ids, 4)
    rows = PackedExperts(torch.randn(4, 17, 24))(torch.zeros(0, 24), offsets)
    assert rows.shape == (0, 17)
    assert dispatch.combine_experts(rows, order, weights).shape == (0, 17)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_packed_experts_give_what_the_plain_product_gives(dtype: torch.dtype) -> None:
    weights, x = torch.randn(5, 70, 64).to(dtype), torch.randn(40, 64).to(dtype)
    offsets = torch.tensor([0, 3, 3, 20, 39, 40], dtype=torch.int32)
    if dtype is torch.float32:
        weights[0] = weights[0].bfloat16()  # of which not all are
    packed = PackedExperts(weights)
    expected = torch.cat(
        [x[a:b].double() @ weights[e].double().T for e, (a, b) in enumerate(pairwise(offsets.tolist()))]
    )
    assert_near(packed(x, offsets), expected, dtype, factor=4)
    assert_near(dispatch.grouped_matmul(x, weights, offsets), expected, dtype, factor=4)
    assert packed.nbytes >= weights.nbytes // 2


def test_a_rows_result_does_not_depend_on_the_others() -> None:
    weights, x = torch.randn(3, 70, 64), torch.randn(30, 64)
    packed = PackedExperts(weights)
    together = packed(x, torch.tensor([0, 10, 20, 30], dtype=torch.int32))
    alone = packed(x[10:11], torch.tensor([0, 0, 1, 1], dtype=torch.int32))
    assert torch.equal(together[10:11], alone)
