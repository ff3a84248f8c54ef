"""The fallback to torch forms without a compiler or on request."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryFile

import pytest

from moonpool.kernels.cpu.build import KERNELS
from moonpool.runtime.service.fork_server import ForkServer

ROOT = Path(__file__).parents[2]

PROGRAM = "tests.kernels.forms_program"
# Forks processes that have imported torch, but nothing of ours: forms are chosen at import.
SERVER = ForkServer({PROGRAM: ["torch"]})


def run(**environment: str) -> subprocess.CompletedProcess[str]:
    command, environment = [sys.executable, "-m", PROGRAM], {**os.environ, **environment}
    with open(os.devnull) as nothing, TemporaryFile() as out, TemporaryFile() as err:
        status = SERVER.ask(command, environment, [nothing.fileno(), out.fileno(), err.fileno()])
        with status:
            assert status.recv(64), "the fork server has ended"
            code = int(status.recv(64))
        for file in (out, err):
            file.seek(0)
        return subprocess.CompletedProcess(command, code, out.read().decode(), err.read().decode())


@pytest.mark.slow
def test_no_compiler(tmp_path: Path) -> None:
    empty = tmp_path / "bin"
    empty.mkdir()
    done = run(PATH=str(empty), XDG_CACHE_HOME=str(tmp_path), CXX="")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("torch | the CPU kernels could not be compiled (no C++ compiler found")
    assert done.stderr.count("no C++ compiler found") == 1


def test_a_compiler_that_fails(tmp_path: Path) -> None:
    broken = tmp_path / "broken-c++"
    broken.write_text("#!/bin/sh\necho 'fatal error: no space left on the moon' >&2\nexit 1\n")
    broken.chmod(0o755)
    done = run(XDG_CACHE_HOME=str(tmp_path), CXX=str(broken))
    assert done.returncode == 0, done.stderr
    assert "no space left on the moon" in done.stdout
    assert list((tmp_path / "moonpool" / "kernels").glob("*.so")) == []


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    done = run(XDG_CACHE_HOME=str(tmp_path / "file"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("torch | the CPU kernels could not be compiled (cannot write")


def test_torch_forms_on_request() -> None:
    done = run(MOONPOOL_KERNELS="torch")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("torch | MOONPOOL_KERNELS=torch")


def test_every_form_passes_its_own_checks() -> None:
    done = run(MOONPOOL_KERNELS="checked")
    assert done.returncode == 0, done.stderr


def test_unknown_mode_is_rejected() -> None:
    done = run(MOONPOOL_KERNELS="chekced")
    assert done.returncode != 0
    assert "MOONPOOL_KERNELS must be" in done.stderr


def test_import_loads_neither_torch_nor_the_library() -> None:
    code = (
        "import sys, moonpool.kernels\n"
        "assert not {'torch', 'moonpool.kernels.cpu', 'moonpool.kernels.dispatch'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_library_name_depends_on_all_inputs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    one, other = tmp_path / "one", tmp_path / "other"
    one.write_text("1")
    other.write_text("2")
    first = KERNELS.path(str(one))
    assert first.is_relative_to(tmp_path)
    assert first == KERNELS.path(str(one))
    assert first != KERNELS.path(str(other))
    monkeypatch.setenv("CXXFLAGS", "-O0")
    assert first != KERNELS.path(str(one))
