"""What there is to run on a GPU: tests and measurements, each a process of its own."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

_PYTEST = (
    "pytest",
    "-q",
    "-p",
    "no:cacheprovider",
    "--disable-warnings",
    # A package that is missing costs the tests of one file, not all.
    "--continue-on-collection-errors",
)


def _several(n: int) -> tuple[str, ...]:
    """Tests in ``n`` processes, where pytest can: most of their time kernels are compiled."""
    return ("-n", str(n)) if find_spec("xdist") is not None else ()


@dataclass(frozen=True, slots=True)
class Part:
    """``report``: it writes its figures as JSON to the path that follows its arguments. ``gpus``: with fewer
    it is left out."""

    name: str
    timeout_s: float
    module: tuple[str, ...]  # python -m …
    report: bool = False
    gpus: int = 1

    def command(self, json_path: Path) -> list[str]:
        return [sys.executable, "-m", *self.module, *(("--json", str(json_path)) if self.report else ())]


# In the order they run: what is short and tells whether anything works comes first.
PARTS = (
    Part("kernels", 150, (*_PYTEST, *_several(8), "tests/kernels/interpreted.py")),
    Part("transfer", 90, (*_PYTEST, "-m", "gpu", "tests/transfer", "--ignore", "tests/transfer/test_tls.py")),
    Part(
        "engine",
        240,
        (*_PYTEST, *_several(4), "-m", "gpu", "tests/engine", "--ignore", "tests/engine/parallel"),
    ),
    Part("ranks", 240, (*_PYTEST, "-m", "gpu", "tests/engine/parallel/test_gpus.py"), gpus=2),
    Part("bench-engine", 150, ("bench", "engine"), report=True),
    Part(
        "bench-transfer",
        120,
        ("bench", "transfer", "--memory", "cuda"),
        report=True,
    ),
    Part("bench-parallel", 300, ("bench", "parallel", "--device", "cuda"), report=True, gpus=2),
    Part("bench-kernels", 360, ("bench", "kernels"), report=True),
    Part("compile", 300, ("moonpool.kernels.compilation.compiler",)),
)
# All but what needs no GPU.
DEFAULT = tuple(part.name for part in PARTS if part.name != "compile")
