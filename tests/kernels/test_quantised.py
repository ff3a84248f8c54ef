"""Linear layers in few bits: exact codes, bounded errors, rows that do not depend on each other."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from moonpool.kernels.cpu.library import load
from moonpool.kernels.quantised import QuantisedExperts, QuantisedLinear, SeparateLinears, linear_of
from moonpool.kernels.reference.quantised import (
    MIDDLE,
    QuantisedWeight,
    pack_nibbles,
    quantised_matmul,
    unpack_nibbles,
)

KINDS = ("int8", "int4", "fp8")
CPU = torch.device("cpu")


def random_weight(
    kind: str, outs: int, ins: int, group: int = 0, *, zeros: bool = False, order: bool = False
) -> QuantisedWeight:
    """Every code may occur, of float8 all but NaN."""
    group = group or ins
    groups = -(-ins // group)
    codes = torch.randint(0, 2 * MIDDLE[kind] or 256, (outs, ins)).to(torch.uint8)
    if kind == "fp8":
        codes[codes & 127 == 127] = 1
    largest = 448 if kind == "fp8" else MIDDLE[kind]
    scales = (torch.rand(outs, groups) + 0.5) / largest / ins**0.5
    offsets = torch.randint(0, 2 * MIDDLE[kind] + 1, (outs, groups)).to(torch.int16) if zeros else None
    return QuantisedWeight(
        kind,
        codes,
        scales,
        group,
        offsets,
        torch.randperm(ins) if order else None,  # type: ignore[arg-type]
    )


def product(x: Tensor, weight: QuantisedWeight, bias: Tensor | None = None) -> Tensor:
    y = x.double() @ weight.dequantised().double().T
    return y if bias is None else y + bias.double()


def bound(x: Tensor, weight: QuantisedWeight) -> Tensor:
    """Of each output: x is rounded to steps of 2^-15 of the largest in its segment of at most 128 inputs, by
    half a step; sums and scales are float32; and the result is rounded to the dtype of x."""
    wide, plain = x.float().abs(), weight.dequantised().abs()
    if weight.order is not None:
        wide, plain = wide[:, weight.order], plain[:, weight.order]
    largest = torch.zeros_like(wide)
    for first in range(0, wide.shape[1], weight.group):
        end = min(first + weight.group, wide.shape[1])
        for at in range(first, end, 128):
            stop = min(at + 128, end)
            largest[:, at:stop] = wide[:, at:stop].amax(1, keepdim=True)
    rounded_x = (largest * 2**-16 * 1.01) @ plain.T
    if weight.kind == "fp8" or load() is None:
        rounded_x.zero_()
    sums = (wide @ plain.T) * 2**-24 * (8 + x.shape[1] / 16)
    return rounded_x + sums


def assert_bounded(y: Tensor, x: Tensor, weight: QuantisedWeight, bias: Tensor | None = None) -> None:
    expected = product(x, weight, bias)
    rounding = {torch.float32: 2**-23, torch.bfloat16: 2**-8, torch.float16: 2**-10}[x.dtype]
    off = (y.double() - expected).abs()
    allowed = bound(x, weight) + rounding * expected.abs() + 1e-7
    assert y.dtype == x.dtype
    assert (off <= allowed).all(), f"off by up to {(off / allowed).max():.3g} of the bound"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("outs", "ins", "group"),
    [(64, 32, 0), (200, 61, 0), (1, 1, 0), (17, 1100, 0), (48, 513, 64), (130, 256, 32), (70, 200, 40)],
)
def test_error_is_bounded(kind: str, dtype: torch.dtype, outs: int, ins: int, group: int) -> None:
    bias = torch.randn(outs).to(dtype)
    for zeros in (False, True)[: 1 if kind == "fp8" else 2]:
        weight = random_weight(kind, outs, ins, group, zeros=zeros)
        linear, biased = QuantisedLinear(weight), QuantisedLinear(weight, bias)
        for rows in (1, 2, 3, 13, 60):
            x = torch.randn(rows, ins).to(dtype)
            assert_bounded(linear(x), x, weight)
            assert_bounded(biased(x), x, weight, bias)


@pytest.mark.parametrize("outs", [1, 64])
@pytest.mark.parametrize("rows", [1, 8])
def test_each_float8_code_is_itself(outs: int, rows: int) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    x = torch.eye(256).repeat_interleave(rows, 0)
    finite = codes & 127 != 127
    kept = torch.where(finite, codes, 0)
    weight = QuantisedWeight("fp8", kept.repeat(outs, 1), torch.ones(outs, 1), 256, None, None)
    expected = kept.view(torch.float8_e4m3fn).float().repeat_interleave(rows)
    y = torch.cat([QuantisedLinear(weight)(part) for part in x.split(rows)])
    assert torch.equal(y, expected[:, None].expand_as(y))
    for code in (127, 255):
        kept[3] = code
        assert QuantisedLinear(replace(weight, codes=kept.repeat(outs, 1)))(x[:rows]).isnan().all()


@pytest.mark.parametrize("kind", KINDS)
def test_the_torch_form_is_exact(kind: str) -> None:
    weight = random_weight(kind, 70, 200, 40, zeros=kind != "fp8")
    codes = pack_nibbles(weight.codes) if kind == "int4" else weight.codes
    x = torch.randn(5, 200, dtype=torch.float64)
    y = quantised_matmul(x, codes, weight.scales, weight.zeros, kind=weight.kind, group=40)
    assert torch.allclose(y, product(x, weight), rtol=1e-12, atol=1e-12)


@given(st.integers(1, 9), st.integers(1, 150))
def test_nibbles_are_packed_without_loss(outs: int, ins: int) -> None:
    codes = torch.randint(0, 16, (outs, ins)).to(torch.uint8)
    packed = pack_nibbles(codes)
    assert packed.shape == (outs, -(-ins // 32) * 16)
    assert torch.equal(unpack_nibbles(packed, ins), codes)


@pytest.mark.skipif(load() is None, reason="no compiler here")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_does_not_depend_on_the_others(kind: str, dtype: torch.dtype) -> None:
    """Bit for bit, whatever the number of rows: a request's tokens must not depend on its batch."""
    linear = QuantisedLinear(random_weight(kind, 200, 1111, 96))
    x = torch.randn(130, 1111).to(dtype)
    whole = linear(x)
    for rows in (1, 2, 3, 6, 7, 8, 16, 47, 48, 129):
        assert torch.equal(linear(x[:rows]), whole[:rows])


@pytest.mark.parametrize("kind", KINDS)
def test_nan_and_infinity_are_not_hidden(kind: str) -> None:
    linear = QuantisedLinear(random_weight(kind, 40, 300))
    x = torch.randn(3, 300)
    x[0, 7], x[2, 290] = float("nan"), float("inf")
    y = linear(x)
    assert y[0].isnan().all()
    assert not y[2].isfinite().any()
    assert torch.equal(y[1], linear(x[1:2])[0])


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_of_zeros_and_rows_that_are_a_view(kind: str) -> None:
    weight = random_weight(kind, 30, 40, zeros=kind != "fp8")
    linear = QuantisedLinear(weight)
    assert linear(torch.zeros(2, 40)).eq(0).all()
    assert linear(torch.empty(0, 40)).shape == (0, 30)
    x = torch.randn(6, 80)
    assert_bounded(linear(x[::2, 40:]), x[::2, 40:], weight)


@pytest.mark.parametrize("kind", KINDS)
def test_inputs_in_another_order(kind: str) -> None:
    weight = random_weight(kind, 50, 128, 32, order=True)
    x = torch.randn(4, 128)
    assert_bounded(QuantisedLinear(weight)(x), x, weight)


@pytest.mark.parametrize("kind", ["int8", "int4"])
@given(st.integers(1, 20), st.integers(1, 200), st.sampled_from([0, 16, 64]))
def test_rounding_of_weights_is_bounded(kind: str, outs: int, ins: int, group: int) -> None:
    """Half a scale, and near the far end of 4 bits one scale."""
    plain = torch.randn(outs, ins)
    weight = QuantisedWeight.of(plain, kind, group)  # type: ignore[arg-type]
    steps = weight.scales.abs().repeat_interleave(weight.group, 1)[:, :ins]
    assert ((weight.dequantised() - plain).abs() <= steps * (1.001 if kind == "int4" else 0.501)).all()
    if kind == "int8":
        assert (steps * 127 <= plain.abs().amax(1, keepdim=True) * 1.001).all()


@given(st.sampled_from(KINDS), st.integers(1, 100), st.sampled_from([0, 8, 24, 32]), st.data())
def test_a_part_of_a_weight_is_the_part_of_the_matrix(
    kind: str, ins: int, group: int, data: st.DataObject
) -> None:
    weight = random_weight(kind, 12, ins, group, zeros=kind != "fp8", order=data.draw(st.booleans()))
    start = data.draw(st.integers(0, ins - 1))
    columns, rows = (
        slice(start, data.draw(st.integers(start + 1, ins))),
        slice(3, data.draw(st.integers(4, 12))),
    )
    expected = weight.dequantised()[rows, columns]
    part = weight[rows, columns]
    assert torch.equal(part if isinstance(part, Tensor) else part.dequantised(), expected)
    assert part.shape == expected.shape
    only_rows = weight[(rows,)]
    assert isinstance(only_rows, QuantisedWeight)
    assert torch.equal(only_rows.dequantised(), weight.dequantised()[rows])
    assert weight[()] is not None


def test_parts_with_the_same_input_are_one_matrix_where_they_can_be() -> None:
    same = [random_weight("int4", 20, 96, 32), random_weight("int4", 30, 96, 32, zeros=True)]
    x, bias = torch.randn(3, 96), torch.randn(50)
    joined = linear_of(same, bias, torch.float32, CPU)
    assert isinstance(joined, QuantisedLinear)
    expected = torch.cat([product(x, part) for part in same], 1) + bias
    assert torch.allclose(joined(x).double(), expected, atol=1e-3)
    for other in (
        random_weight("int8", 30, 96, 32),
        random_weight("int4", 30, 96, 48),
        random_weight("int4", 30, 96, 32, order=True),
        torch.randn(30, 96),
    ):
        separate = linear_of([same[0], other], bias, torch.float32, CPU)
        assert isinstance(separate, SeparateLinears)
        right = x.double() @ other.double().T if isinstance(other, Tensor) else product(x, other)
        assert torch.allclose(
            separate(x).double(), torch.cat([product(x, same[0]), right], 1) + bias, atol=1e-3
        )


def test_a_weight_in_few_bits_takes_few_bytes() -> None:
    plain = torch.randn(256, 1024)
    int8, int4 = QuantisedWeight.of(plain, "int8"), QuantisedWeight.of(plain, "int4", 64)
    assert QuantisedLinear(int8).nbytes == 256 * 1024 + 4 * 256
    assert QuantisedLinear(int4).nbytes == 256 * 1024 // 2 + 4 * 256 * 16


def test_experts() -> None:
    weights = [random_weight("int4", 24, 64, 32) for _ in range(3)]
    experts = QuantisedExperts([QuantisedLinear(weight) for weight in weights])
    x = torch.randn(9, 64)
    y = experts(x, torch.tensor([0, 4, 4, 7], dtype=torch.int32))
    assert_bounded(y[:4], x[:4], weights[0])
    assert_bounded(y[4:7], x[4:7], weights[2])
    assert y[7:].eq(0).all()
