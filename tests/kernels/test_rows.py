"""Operations on rows of activations, against float64."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from moonpool.kernels.cpu.library import load
from tests.kernels.paged import assert_near

EPS = 1e-5


def expected_norm(x: Tensor, weight: Tensor) -> Tensor:
    x = x.double()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight.double()


@pytest.mark.parametrize("hidden", [1, 15, 16, 17, 64, 100, 256, 4096])
def test_rms_norm(form: ModuleType, dtype: torch.dtype, hidden: int) -> None:
    x, residual = torch.randn(2, 5, hidden).to(dtype).unbind(0)
    weight = torch.randn(hidden).to(dtype)
    assert_near(form.rms_norm(x, weight, EPS), expected_norm(x, weight), dtype)
    normed, total = form.rms_norm(x, weight, EPS, residual=residual)
    assert torch.equal(total, x + residual)
    assert_near(normed, expected_norm(total, weight), dtype)


def test_rms_norm_leaves_its_inputs_alone(form: ModuleType) -> None:
    x, residual, weight = torch.randn(3, 40), torch.randn(3, 40), torch.randn(40)
    before = (x.clone(), residual.clone(), weight.clone())
    form.rms_norm(x, weight, EPS, residual=residual)
    assert all(map(torch.equal, (x, residual, weight), before))


def test_rms_norm_of_a_view(form: ModuleType) -> None:
    x, weight = torch.randn(6, 80), torch.randn(40)
    assert_near(form.rms_norm(x[::2, 40:], weight, EPS), expected_norm(x[::2, 40:], weight), torch.float32)


def test_rms_norm_of_mixed_dtypes(form: ModuleType) -> None:
    x, weight = torch.randn(3, 40).bfloat16(), torch.randn(40)
    assert_near(form.rms_norm(x, weight, EPS), expected_norm(x, weight), torch.bfloat16)


@pytest.mark.parametrize("inter", [1, 16, 17, 704, 1000])
def test_silu_mul(form: ModuleType, dtype: torch.dtype, inter: int) -> None:
    gate_up = torch.randn(7, 2 * inter).to(dtype) * 5
    gate, up = gate_up.double().chunk(2, -1)
    assert_near(form.silu_mul(gate_up), F.silu(gate) * up, dtype)


def test_silu_of_the_extremes(form: ModuleType) -> None:
    gate = torch.tensor([[-1e30, -200.0, -88.8, -87.0, -1e-30, 0.0, 1e-30, 87.0, 88.8, 200.0, 1e30]])
    out = form.silu_mul(torch.cat((gate, torch.ones_like(gate)), -1))
    assert torch.allclose(out.double(), F.silu(gate.double()), rtol=1e-5, atol=1e-36)
    nan = torch.full((1, 40), float("nan"))
    assert form.silu_mul(nan).isnan().all()


@pytest.mark.parametrize("vocab", [1, 5, 16, 2048, 32001])
def test_argmax(form: ModuleType, dtype: torch.dtype, vocab: int) -> None:
    logits = torch.randn(9, vocab).to(dtype)
    assert torch.equal(form.argmax_rows(logits), logits.argmax(-1))


def test_argmax_takes_the_first_of_equals(form: ModuleType) -> None:
    logits = torch.zeros(4, 70)
    logits[1, 69] = logits[1, 33] = 2.0
    logits[2] = float("-inf")
    logits[3, 40] = logits[3, 50] = float("nan")
    assert form.argmax_rows(logits).tolist() == [0, 33, 0, 40]


@pytest.mark.skipif(load() is None, reason="no compiler here")
@given(st.lists(st.floats(width=32), min_size=1, max_size=80))
def test_argmax_is_torchs(values: list[float]) -> None:
    from moonpool.kernels.cpu import operations as ops

    logits = torch.tensor([values])
    assert torch.equal(ops.argmax_rows(logits), logits.argmax(-1))


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 2048, 32_001])
def test_forbidden_tokens(form: ModuleType, vocab: int) -> None:
    """Words of no token, of some and of all; what is forbidden may be NaN."""
    allowed = (
        torch.rand(5, -(-vocab // 32), 32)
        < torch.tensor([0, 0.5, 0.5, 1]).repeat(vocab)[: -(-vocab // 32), None]
    )
    words = (allowed.long() << torch.arange(32)).sum(-1).int()
    scores = torch.randn(5, vocab)
    expected = torch.where(allowed.flatten(1)[:, :vocab], scores, float("-inf"))
    scores[expected == float("-inf")] = float("nan")
    form.forbid_tokens(scores, words)
    assert torch.equal(scores, expected)


def test_no_rows(form: ModuleType) -> None:
    assert form.rms_norm(torch.empty(0, 40), torch.ones(40), EPS).shape == (0, 40)
    assert form.silu_mul(torch.empty(0, 40)).shape == (0, 20)
    assert form.argmax_rows(torch.empty(0, 40)).shape == (0,)
    form.forbid_tokens(torch.empty(0, 40), torch.empty(0, 2, dtype=torch.int32))
