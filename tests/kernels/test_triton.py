"""The Triton forms without a GPU: right in the interpreter, and fit for use as compiled for one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

from kernels import triton_compile

ROOT = Path(__file__).parents[2]


def test_right_in_the_interpreter() -> None:
    """In a process of its own: whether kernels are interpreted is decided when they are defined."""
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-x",
            "-p",
            "no:cacheprovider",
            "tests/kernels/interpreted.py",
        ],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def _compile_all(cases: list[triton_compile.Case], arch: int) -> list[str]:
    return [
        fault
        for case in cases
        for fault in triton_compile.compile_case(case, arch).faults(case.multiplies_tiles)
    ]


def test_what_is_served_compiles_for_a_hopper() -> None:
    """No spills, shared memory within bounds, tensor cores in use."""
    cases = [case for case in triton_compile.all_cases(90) if case.name in SERVED or "G" not in case.name]
    assert len(cases) == 13
    assert _compile_all(cases, 90) == []


SERVED = ("decode bfloat16 D128 G4 B16", "prefill bfloat16 D128 G4 B16")


@pytest.mark.slow
@pytest.mark.parametrize("arch", [80, 90])
def test_everything_compiles(arch: int) -> None:
    assert _compile_all(list(triton_compile.all_cases(arch)), arch) == []


def test_a_kernel_that_spills_is_a_fault() -> None:
    made = triton_compile.Resources("some kernel", 90, 255, 8, 300 << 10, 0)
    assert len(made.faults(multiplies_tiles=True)) == 3
