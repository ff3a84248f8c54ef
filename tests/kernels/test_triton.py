"""The Triton forms without a GPU: their resources as compiled."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton")

from moonpool.kernels.compilation.attention_cases import AttentionCase, decode_case, prefill_case
from moonpool.kernels.compilation.catalog import all_cases, other_cases
from moonpool.kernels.compilation.compiler import Resources, compile_all
from moonpool.kernels.compilation.kernel_case import Case
from moonpool.kernels.triton import decode as triton_decode
from moonpool.kernels.triton import prefill as triton_prefill
from moonpool.kernels.triton.launch import decode_choice, prefill_choice, table

_FAULTS: dict[tuple[str, int], list[str]] = {}


def faults_of(cases: list[Case], arch: int) -> list[str]:
    """Compiles what no test before has compiled."""
    new = [case for case in cases if (case.name, arch) not in _FAULTS]
    _FAULTS.update(((made.case, arch), faults) for made, faults in compile_all(new, arch))
    return [fault for case in cases for fault in _FAULTS[case.name, arch]]


@pytest.mark.slow  # 18 s on both cores
def test_what_is_served_compiles_for_a_hopper() -> None:
    """No spills, shared memory within bounds, tensor cores by warp groups, loads of 16 bytes, and as many
    programs on a multiprocessor as the launch table counts on."""
    served = [AttentionCase(torch.bfloat16, pages, 128) for pages in (torch.bfloat16, torch.float8_e4m3fn)]
    cases = [make(what, 90) for what in served for make in (decode_case, prefill_case)]
    cases += other_cases(90)
    assert len(cases) == 4 + 14 + 10
    assert faults_of(cases, 90) == []


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("arch", [80, 90])
def test_everything_compiles(arch: int) -> None:
    cases = list(all_cases(arch))
    assert len({case.name for case in cases}) == len(cases)
    assert faults_of(cases, arch) == []


def test_every_row_of_the_launch_table_is_compiled() -> None:
    """Every choice of the launch table is a case of the compilation."""
    compiled = {
        (case.constants["DIM"], case.constants["TILE"], case.num_warps, case.num_stages)
        for arch in (80, 90)
        for case in all_cases(arch)
        if "TILE" in case.constants and case.kernel is triton_decode.decode_partition
    }
    chosen = {
        (row["head_dim"], row["choice"]["tile"], row["choice"]["num_warps"], row["choice"]["num_stages"])
        for row in table()["decode"]
        if row["kind"] != "wide"
    }
    # Long heads are compiled with few rows only.
    assert {row for row in chosen - compiled if row[0] == 128} == set()
    prefills = {
        (case.constants["ROWS"], case.constants["TILE"], case.num_warps, case.num_stages)
        for arch in (80, 90)
        for case in all_cases(arch)
        if case.kernel is triton_prefill.prefill_tile
    }
    for row in table()["prefill"]:
        choice = row["choice"]
        assert (choice["rows"], choice["tile"], choice["num_warps"], choice["num_stages"]) in prefills


def test_faults_of_an_unfit_kernel() -> None:
    case = next(iter(all_cases(90)))
    made = Resources("some kernel", 90, 4, 255, 8, 300 << 10, 0, 0, 4)
    found = " ".join(made.faults(replace(case, multiplies_warpgroups=True)))
    for word in ("spills", "shared memory", "tensor cores", "warp groups", "loads 4 bytes", "fits 0 times"):
        assert word in found


@given(
    st.sampled_from([16, 64, 80, 128, 256]),
    st.sampled_from([16, 32, 64, 256, 512]),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    st.booleans(),
    st.sampled_from([80, 86, 89, 90, 100]),
)
def test_there_is_a_choice_for_every_shape(
    head_dim: int, rows: int, dtype: torch.dtype, fp8: bool, arch: int
) -> None:
    pages = torch.float8_e4m3fn if fp8 else dtype
    decode = decode_choice(head_dim, rows, dtype, pages, arch)
    assert decode.tile in (16, 32, 64, 128)
    assert prefill_choice(head_dim, dtype, pages, arch).rows in (16, 32, 64, 128)
