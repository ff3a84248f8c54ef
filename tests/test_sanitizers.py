"""Native code under the address and undefined-behaviour sanitizers: its tests run once more."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from moonpool.runtime.machine.compiled_library import find_compiler

ROOT = Path(__file__).resolve().parent.parent
_FLAGS = "-fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer -O1 -g1"
# Random histories, torn and forged bytes, peers that die, rings that are full.
_TESTS = {
    "index": ("tests/kvstore/test_block_map.py", "tests/kvstore/test_mirror.py"),
    "transfer": (
        "tests/transfer/test_native.py",
        "tests/transfer/test_inline_reads.py",
        "tests/transfer/test_inline_writes.py",
        "tests/transfer/test_inline_tcp_reads.py",
        "tests/transfer/safety",
    ),
    "kernels": (
        "tests/kernels/test_states.py",
        "tests/kernels/test_rows.py",
        "tests/kernels/test_adapters.py",
        "tests/kernels/test_experts.py",
        "tests/kernels/test_quantised.py",
        "tests/kernels/test_threads.py",
    ),
}


@pytest.fixture(scope="module")
def sanitized() -> dict[str, str]:
    """The environment in which native code is compiled with the sanitizers, and run."""
    compiler = find_compiler()
    if compiler is None or "g++" not in Path(compiler).name:
        pytest.skip("needs g++, whose sanitizers are libraries that a process can load first")
    libraries = []
    for name in ("libasan.so", "libubsan.so"):
        command = [compiler, f"-print-file-name={name}"]
        found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        assert Path(found).is_absolute(), f"{compiler} has no {name}"
        libraries.append(found)
    environment = os.environ | {
        "CXXFLAGS": _FLAGS,
        "LD_PRELOAD": " ".join(libraries),
        # Python keeps memory until it ends, which is no leak.
        "ASAN_OPTIONS": "detect_leaks=0:halt_on_error=1:abort_on_error=1",
        "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
    }
    # Minutes where another test keeps the cores busy. The fork server of the tests would compile them as it
    # imports a node, and say nothing of a process that was killed until it is done.
    build = [sys.executable, "-m", "moonpool.kernels.cpu.build"]
    subprocess.run(build, cwd=ROOT, env=environment, check=True)
    return environment


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("library", _TESTS)
def test_native_code_reads_and_writes_only_its_own_memory(sanitized: dict[str, str], library: str) -> None:
    # What a sanitizer prints as it ends the process must not be captured inside it.
    options = ["-q", "-x", "-n0", "-m", "not slow", "--capture=no"]
    command = [sys.executable, "-m", "pytest", *options, *_TESTS[library]]
    done = subprocess.run(command, cwd=ROOT, env=sanitized, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[:6000]}"
