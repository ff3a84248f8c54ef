"""The results of the Triton forms in Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "tests" / "kernels" / "interpreted"
# What one process runs: imports take it three seconds.
SHARES = [("decode",), ("prefill", "operations"), ("products", "latents")]


def test_every_file_is_run() -> None:
    assert {f"test_{name}" for share in SHARES for name in share} == {
        file.stem for file in FOLDER.glob("test_*.py")
    }


@pytest.mark.slow
@pytest.mark.parametrize("share", SHARES, ids=lambda share: share[0])
def test_triton_forms(share: tuple[str, ...]) -> None:
    """In a separate process, because the interpreter is chosen when kernels are defined."""
    files = [str(FOLDER / f"test_{name}.py") for name in share]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *files],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
