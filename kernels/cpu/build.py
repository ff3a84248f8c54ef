"""Compiles the C++ form of the kernels on the machine that runs it, for that machine's processor.

``python -m kernels.cpu.build`` does it ahead of time; the first import does it otherwise. The library lies in
the user's cache directory under a name made of the sources, the compiler and the processor's features, so
that a new version, compiler or machine gets its own and nothing stale is ever loaded. It needs g++ or clang++
and nothing of torch or Python.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from kernels.cpu.features import cpuinfo
from runtime.errors import MoonpoolError

log = logging.getLogger(__name__)

SOURCE_DIR = Path(__file__).parent
COMPILE_FLAGS = (
    "-O3",
    "-std=c++17",
    "-fPIC",
    "-fvisibility=hidden",
    "-fno-math-errno",
    "-ffp-contract=fast",
    "-w",
)


class BuildFailed(MoonpoolError):
    """The CPU kernels could not be compiled. The torch forms are used instead; nothing else is affected."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"the CPU kernels could not be compiled ({reason}); slower torch forms are used")
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Compiler:
    path: str

    @property
    def flags(self) -> list[str]:
        """Ours, then what asks for this machine's instructions (ARM compilers spell it differently), then
        $CXXFLAGS, which may ask for others."""
        native = "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native"
        return [*COMPILE_FLAGS, native, *os.environ.get("CXXFLAGS", "").split()]

    def identity(self) -> str:
        """Changes when the compiler is replaced."""
        file = Path(self.path).resolve()
        facts = file.stat()
        return f"{file}:{facts.st_size}:{facts.st_mtime_ns}"


def find_compiler() -> Compiler:
    """$CXX, else the first of g++, clang++, c++ on PATH.

    Raises:
        BuildFailed: there is none.
    """
    for name in (os.environ.get("CXX", ""), "g++", "clang++", "c++"):
        path = shutil.which(name) if name else None
        if path:
            return Compiler(path)
    raise BuildFailed("no C++ compiler found; install g++, e.g. `apt install g++`")


def sources() -> list[Path]:
    return sorted(SOURCE_DIR.glob("*.cpp"))


def processor() -> str:
    """The processor's name and all its feature flags: another one needs another library."""
    info = cpuinfo()
    wanted = ("model name", "flags", "Features", "CPU part")
    return "\n".join([platform.machine(), *(info[name] for name in wanted if name in info)])


def cache_dir() -> Path:
    """Where libraries are kept: $XDG_CACHE_HOME/moonpool/kernels, by default under ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "moonpool" / "kernels"


def library_path(compiler: Compiler) -> Path:
    """The file of the library that this compiler makes of these sources on this machine."""
    digest = hashlib.sha256()
    for file in sorted([*SOURCE_DIR.glob("*.h"), *sources()]):
        digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    for fact in (compiler.identity(), processor(), " ".join(compiler.flags)):
        digest.update(fact.encode() + b"\0")
    return cache_dir() / f"kernels-{digest.hexdigest()[:20]}.so"


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
        raise BuildFailed(f"{command[0]} failed: {lines[0] if lines else f'exit {done.returncode}'}")


def _compile(compiler: Compiler, target: Path) -> None:
    """Compile beside the target and rename, so that a reader sees a whole library or none."""
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        objects = {file: Path(scratch) / f"{file.stem}.o" for file in sources()}
        commands = [
            [compiler.path, *compiler.flags, "-c", str(file), "-o", str(made)]
            for file, made in objects.items()
        ]
        with ThreadPoolExecutor(max_workers=min(len(commands), os.cpu_count() or 1)) as workers:
            list(workers.map(_run, commands))
        linked = Path(scratch) / "kernels.so"
        _run([compiler.path, "-shared", "-o", str(linked), *map(str, objects.values())])
        os.rename(linked, target)


def build() -> Path:
    """The library's path, compiled now if it is not there yet. Safe to call from many processes at once: one
    compiles, the others wait for it.

    Raises:
        BuildFailed: no compiler, a compile error, or nowhere to write. Nothing half-made is left behind.
    """
    compiler = find_compiler()
    target = library_path(compiler)
    if target.exists():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with open(target.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not target.exists():
                log.info("compiling the CPU kernels for this machine, once (about ten seconds)")
                _compile(compiler, target)
    except OSError as error:
        raise BuildFailed(f"cannot write {target.parent}: {error.strerror}") from error
    return target


def main() -> int:
    begin = time.perf_counter()
    try:
        path = build()
    except BuildFailed as error:
        print(f"kernels: {error}", file=sys.stderr)
        return 1
    print(f"kernels: {path} ({time.perf_counter() - begin:.1f} s)")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
