"""A browser or a Prometheus that is missing is a failure in CI, and a reason to skip elsewhere."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = """
import pytest

@pytest.mark.skipif(True, reason="needs a browser: apt install chromium; CI has it")
def test_marked(): ...

def test_called():
    pytest.skip("needs promtool")

def test_gpu():
    pytest.skip("needs an NVIDIA GPU: `make gpu`, on a machine that has one")

@pytest.mark.xfail
def test_expected_to_fail():
    assert False
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ci", "outcome"), [("true", "1 failed, 1 skipped, 1 xfailed, 1 error"), ("", "3 skipped, 1 xfailed")]
)
def test_what_ci_lacks_is_a_failure_there(tmp_path: Path, ci: str, outcome: str) -> None:
    (tmp_path / "test_some.py").write_text(TESTS)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "tests.ci_skips",
            "--rootdir",
            str(tmp_path),
            str(tmp_path),
        ],
        cwd=Path(__file__).parents[1],
        env={**os.environ, "CI": ci},
        capture_output=True,
        text=True,
        check=False,
    )
    assert outcome in done.stdout, done.stdout + done.stderr
    assert ("CI lacks what this test needs: " in done.stdout) == bool(ci)
