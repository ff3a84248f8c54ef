"""The parts of `make gpu`: tests and measurements, each a process of its own."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

# A package that is missing costs the tests of one file, not all.
_PYTEST = ("pytest", "-q", "-p", "no:cacheprovider", "--disable-warnings", "--continue-on-collection-errors")


def _workers(n: int) -> tuple[str, ...]:
    """Options for ``n`` processes, where pytest can: most of the time kernels are compiled."""
    return ("-n", str(n)) if find_spec("xdist") is not None else ()


@dataclass(frozen=True, slots=True)
class Part:
    """report: the module writes JSON to the path that follows its arguments. gpus: the least number."""

    name: str
    timeout_s: float
    module: tuple[str, ...]  # python -m …
    report: bool = False
    gpus: int = 1

    def command(self, json_path: Path) -> list[str]:
        return [sys.executable, "-m", *self.module, *(("--json", str(json_path)) if self.report else ())]


def _bench(name: str, timeout_s: float, *options: str, gpus: int = 1) -> Part:
    return Part(f"bench-{name}", timeout_s, ("moonpool.bench", name, *options), report=True, gpus=gpus)


# In the order they run: first what is short and shows whether anything works.
PARTS = (
    Part("kernels", 150, (*_PYTEST, *_workers(8), "tests/kernels/interpreted.py")),
    Part("transfer", 90, (*_PYTEST, "-m", "gpu", "tests/transfer", "--ignore", "tests/transfer/test_tls.py")),
    Part(
        "engine",
        240,
        (*_PYTEST, *_workers(4), "-m", "gpu", "tests/engine", "--ignore", "tests/engine/ranks"),
    ),
    Part("ranks", 240, (*_PYTEST, "-m", "gpu", "tests/engine/ranks/test_gpus.py"), gpus=2),
    _bench("engine", 150),
    _bench("transfer", 120, "--memory", "cuda"),
    _bench("parallel", 300, "--device", "cuda", gpus=2),
    _bench("kernels", 360),
    Part("compile", 300, ("moonpool.kernels.compilation.compiler",)),
)
# All but the one that needs no GPU.
DEFAULT = tuple(part.name for part in PARTS if part.name != "compile")
