"""The fallback to torch forms without a compiler or on request."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from moonpool.kernels.cpu.build import KERNELS
from moonpool.runtime.machine.compiled_library import Compiler

ROOT = Path(__file__).parents[2]

# Every operation once, on a batch whose answer is known: all keys are equal, attention gives the mean of V.
PROGRAM = """
import logging, torch
logging.basicConfig(format="%(levelname)s %(message)s")
from moonpool import kernels
from moonpool.kernels import PackedLinear
pool = torch.full((4, 1, 2, 1, 8, 16), float("nan"))
slots, positions = torch.arange(8, 18), torch.zeros(10, dtype=torch.int64)
cos, sin = torch.ones(1, 8), torch.zeros(1, 8)
q = kernels.rotate_and_write(torch.ones(10, 3 * 16), positions, cos, sin, pool, 0, slots,
                             num_heads=1, num_kv_heads=1, head_dim=16)
table, lens = torch.tensor([[1, 2, -1]], dtype=torch.int32), torch.tensor([10], dtype=torch.int32)
out = kernels.paged_decode_attention(q[-1:], pool, 0, table, lens, scale=1.0)
assert torch.allclose(out, torch.ones_like(out)), out
starts = torch.tensor([0, 10], dtype=torch.int32)
out = kernels.paged_prefill_attention(q, pool, 0, table, starts, lens, scale=1.0)
assert torch.allclose(out, torch.ones_like(out)), out
kernels.write_kv(torch.ones(1, 1, 16), torch.ones(1, 1, 16), pool, 0, torch.tensor([0]))
x = torch.ones(2, 16)
assert torch.allclose(kernels.rms_norm(x, torch.ones(16), 0.0), x)
assert kernels.silu_mul(x).shape == (2, 8)
assert kernels.argmax_rows(torch.eye(3)).tolist() == [0, 1, 2]
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    linear = PackedLinear(torch.eye(16).to(dtype), torch.zeros(16).to(dtype))
    for given in (x, x.to(dtype)):
        y = linear(given)
        assert y.dtype == given.dtype and torch.equal(y, given)
    assert torch.equal(linear.weight, torch.eye(16).to(dtype))
report = kernels.backend_report()["cpu"]
print(report["form"], "|", report["reason"])
"""


def run(program: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run in a separate process, because forms are chosen at import."""
    return subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


def test_no_compiler(tmp_path: Path) -> None:
    empty = tmp_path / "bin"
    empty.mkdir()
    done = run(PROGRAM, PATH=str(empty), XDG_CACHE_HOME=str(tmp_path), CXX="")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("torch | the CPU kernels could not be compiled (no C++ compiler found")
    assert done.stderr.count("no C++ compiler found") == 1


def test_a_compiler_that_fails(tmp_path: Path) -> None:
    broken = tmp_path / "broken-c++"
    broken.write_text("#!/bin/sh\necho 'fatal error: no space left on the moon' >&2\nexit 1\n")
    broken.chmod(0o755)
    done = run(PROGRAM, XDG_CACHE_HOME=str(tmp_path), CXX=str(broken))
    assert done.returncode == 0, done.stderr
    assert "no space left on the moon" in done.stdout
    assert list((tmp_path / "moonpool" / "kernels").glob("*.so")) == []


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    done = run(PROGRAM, XDG_CACHE_HOME=str(tmp_path / "file"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("torch | the CPU kernels could not be compiled (cannot write")


def test_torch_forms_on_request() -> None:
    done = run(PROGRAM, MOONPOOL_KERNELS="torch")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("torch | MOONPOOL_KERNELS=torch")


def test_every_form_passes_its_own_checks() -> None:
    done = run(PROGRAM, MOONPOOL_KERNELS="checked")
    assert done.returncode == 0, done.stderr


def test_unknown_mode_is_rejected() -> None:
    done = run(PROGRAM, MOONPOOL_KERNELS="chekced")
    assert done.returncode != 0
    assert "MOONPOOL_KERNELS must be" in done.stderr


def test_import_loads_neither_torch_nor_the_library() -> None:
    done = run(
        "import sys, moonpool.kernels\n"
        "assert not {'torch', 'moonpool.kernels.cpu', 'moonpool.kernels.dispatch'} & sys.modules.keys()"
    )
    assert done.returncode == 0, done.stderr


def test_library_name_depends_on_all_inputs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    one, other = tmp_path / "one", tmp_path / "other"
    one.write_text("1")
    other.write_text("2")
    first = KERNELS.path(Compiler(str(one)))
    assert first.is_relative_to(tmp_path)
    assert first == KERNELS.path(Compiler(str(one)))
    assert first != KERNELS.path(Compiler(str(other)))
    monkeypatch.setenv("CXXFLAGS", "-O0")
    assert first != KERNELS.path(Compiler(str(one)))
