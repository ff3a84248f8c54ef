"""Documentation names files that exist, and docs/architecture.md has a line for every folder."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PACKAGES = sorted(path.parent for path in ROOT.glob("*/__init__.py") if path.parent.name != "tests")


def test_every_room_has_a_line() -> None:
    listed = set(rooms(ROOT / "docs" / "architecture.md"))
    there = {str(path.relative_to(ROOT)) for package in PACKAGES for path in folders(package)}
    assert there - listed == set(), "add a line to docs/architecture.md"
    assert listed - there - {"bench/results"} == set(), "docs/architecture.md names folders that are gone"


def folders(folder: Path) -> Iterator[Path]:
    yield folder
    for path in sorted(folder.iterdir()):
        # What lies inside one benchmark's folder is that benchmark's own affair.
        inside_a_benchmark = folder.parent == ROOT / "bench"
        if (path / "__init__.py").exists() and not path.is_symlink() and not inside_a_benchmark:
            yield from folders(path)


def rooms(page: Path) -> Iterator[str]:
    """The folders of the tree in a page's first fenced block; a line may name several side by side."""
    tree = re.search(r"^```\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    assert tree is not None
    stack: list[str] = []
    for line in tree[1].splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        names = re.match(r"\s*((?:\w+/ ?)+)", line)
        assert names is not None, line
        for name in names[1].split():
            stack = [*stack[:depth], name.rstrip("/")]
            yield "/".join(stack)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_that_are_named_exist(page: Path) -> None:
    names = {path.name for path in PACKAGES} | {"tests", "docs", "deploy"}
    for path in re.findall(r"`([\w./-]+/[\w./-]*)`", page.read_text()):
        if path.partition("/")[0] in names and "*" not in path:
            assert (ROOT / path).exists(), f"{page.name} names {path}"
