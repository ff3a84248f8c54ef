"""A committed result names its command line, and a commit of this history."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "bench" / "results").glob("*.json"))
# The first commit: a shallow clone, or an archive, does not have it.
BEGIN = "57d2b2a7d626e8f89c99c9873c060c310dfdd353"


def git(*arguments: str) -> int:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, check=False).returncode


def environment(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())["environment"]
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_result_names_its_command_line(path: Path) -> None:
    assert re.match(r"(python -m )?moonpool bench \w+ .*--json ", environment(path)["command"])


def test_the_commits_of_results_are_in_this_history() -> None:
    if git("merge-base", "--is-ancestor", BEGIN, "HEAD"):
        pytest.skip("no history here: a shallow clone, or no clone")
    commits = {path.name: environment(path)["commit"] for path in FILES}
    # "+" behind it would say that changes were not committed.
    elsewhere = {
        name: commit
        for name, commit in commits.items()
        if not re.fullmatch("[0-9a-f]{7,40}", commit) or git("merge-base", "--is-ancestor", commit, "HEAD")
    }
    assert not elsewhere, "measure again, from a clean checkout of a commit that stays"
