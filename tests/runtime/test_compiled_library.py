"""Libraries that are compiled once: whole, or compiled again."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from moonpool.runtime.machine.compiled_library import CompiledLibrary, find_compiler


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> CompiledLibrary:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    source = tmp_path / "source"
    source.mkdir()
    (source / "answer.cpp").write_text('extern "C" int answer() { return 42; }')
    return CompiledLibrary("answers", "the answers", "none are given", source, ("-fPIC",))


def test_it_is_compiled_once(library: CompiledLibrary) -> None:
    path = library.build()
    before = path.stat()
    assert ctypes.CDLL(str(path)).answer() == 42
    after = library.build().stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


@pytest.mark.parametrize("kept", [0.0, 0.1, 0.5, 0.99])
def test_one_that_a_power_loss_cut_short_is_compiled_again(library: CompiledLibrary, kept: float) -> None:
    whole = library.build().read_bytes()
    compiler = find_compiler()
    assert compiler is not None
    library.path(compiler).write_bytes(whole[: int(len(whole) * kept)])
    assert library.build().stat().st_size == len(whole)
    assert ctypes.CDLL(str(library.build())).answer() == 42


def test_one_of_zeros_is_compiled_again(library: CompiledLibrary) -> None:
    path = library.build()
    path.write_bytes(bytes(path.stat().st_size))
    assert ctypes.CDLL(str(library.build())).answer() == 42
