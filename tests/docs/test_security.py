"""docs/security.md names tests that exist, and every attack is in it."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "security.md").read_text()
NAMED = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE)


def test_the_named_tests_exist() -> None:
    assert len(NAMED) > 20
    for file, name in NAMED:
        assert re.search(rf"^(async )?def {name}\(", (ROOT / file).read_text(), re.MULTILINE), (file, name)


def test_every_row_of_the_threats_names_a_test() -> None:
    table = PAGE.partition("## Threats")[2].partition("## Audit")[0]
    rows = [line for line in table.splitlines() if line.startswith("|")][2:]
    assert rows
    for row in rows:
        assert re.search(r"`tests/[\w/]+\.py::\w+` \|$", row), row


def test_every_attack_is_in_the_table() -> None:
    for file in (ROOT / "tests" / "attack").glob("test_*.py"):
        for name in re.findall(r"^(?:async )?def (test_\w+)\(", file.read_text(), re.MULTILINE):
            assert (f"tests/attack/{file.name}", name) in NAMED, f"add {name} to docs/security.md"
