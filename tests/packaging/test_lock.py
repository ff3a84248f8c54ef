"""requirements.lock has the hashes of what constraints.txt names, and of nothing else."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_lock_is_of_the_constraints() -> None:
    constraints = re.findall(r"^[A-Za-z0-9]\S*", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    locked = [line.split() for line in (ROOT / "requirements.lock").read_text().splitlines()]
    assert sorted(map(_name, constraints)) == sorted(_name(line[0]) for line in locked), "run `make lock`"
    for name, *hashes in locked:
        assert hashes, name
        assert all(re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", one) for one in hashes), name


def _name(pinned: str) -> str:
    return pinned.lower().replace("_", "-")
