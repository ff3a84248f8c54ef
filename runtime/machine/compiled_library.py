"""C++ libraries, compiled once on the machine that runs them.

A library is in the user's cache directory. Its name is a digest of the sources, the compiler, the flags and
the processor, so that a stale library is never loaded. One that a power loss has cut short is compiled
again. Compilation needs g++ or clang++, but no Python headers.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from moonpool.runtime.errors import MoonpoolError
from moonpool.runtime.failures import FailureClass
from moonpool.runtime.machine.processor import processor_name

log = logging.getLogger(__name__)

_ELF_HEADER_NBYTES = 64


def cache_folder() -> Path:
    """$XDG_CACHE_HOME/moonpool, by default ~/.cache/moonpool. It need not exist."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "moonpool"


class BuildFailed(MoonpoolError):
    """A library could not be compiled. Its fallback is used; nothing else is affected."""

    failure = FailureClass.WORKER

    def __init__(self, library: CompiledLibrary, reason: str) -> None:
        super().__init__(f"{library.title} could not be compiled ({reason}); {library.instead}")
        self.reason = reason


def find_compiler() -> str | None:
    """The path of $CXX, else of the first of g++, clang++, c++ on PATH."""
    names = (os.environ.get("CXX", ""), "g++", "clang++", "c++")
    return next(filter(None, map(shutil.which, names)), None)


def _identity(compiler: str) -> str:
    """A text that changes when the compiler is replaced."""
    file = Path(compiler).resolve()
    facts = file.stat()
    return f"{file}:{facts.st_size}:{facts.st_mtime_ns}"


def _is_whole(library: Path) -> bool:
    """Whether the file exists and is as long as its ELF header says. To load a shorter one may be SIGBUS."""
    try:
        with library.open("rb") as file:
            header, nbytes = file.read(_ELF_HEADER_NBYTES), os.fstat(file.fileno()).st_size
    except OSError:
        return False
    if len(header) < _ELF_HEADER_NBYTES or not header.startswith(b"\x7fELF"):
        return False
    # Linkers write the table of sections last.
    (begin,) = struct.unpack_from("=Q", header, 40)
    entry_nbytes, num_entries = struct.unpack_from("=HH", header, 58)
    return bool(begin + entry_nbytes * num_entries <= nbytes)


@dataclass(frozen=True, slots=True)
class CompiledLibrary:
    """All *.cpp of ``folder`` as one shared library. title, instead: texts for the error message."""

    name: str
    title: str
    instead: str
    folder: Path
    flags: tuple[str, ...]

    def _flags(self) -> list[str]:
        """The flags of this library, then $CXXFLAGS, which may override them."""
        return [*self.flags, *os.environ.get("CXXFLAGS", "").split()]

    def path(self, compiler: str) -> Path:
        """The library's file, below ``cache_folder()``."""
        digest = hashlib.sha256()
        for file in sorted([*self.folder.glob("*.h"), *self.folder.glob("*.cpp")]):
            digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
        for fact in (_identity(compiler), processor_name(), " ".join(self._flags())):
            digest.update(fact.encode() + b"\0")
        return cache_folder() / self.name / f"{self.name}-{digest.hexdigest()[:20]}.so"

    def build(self) -> Path:
        """Compile the library if necessary and return its path.

        Many processes may call this at once: one compiles, the others wait.

        Raises:
            BuildFailed: no compiler, a compile error, or no writable directory. No partial file remains.
        """
        compiler = find_compiler()
        if compiler is None:
            raise BuildFailed(self, "no C++ compiler found; install g++, e.g. `apt install g++`")
        target = self.path(compiler)
        if _is_whole(target):
            return target
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with open(target.with_suffix(".lock"), "w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not _is_whole(target):
                    log.info("compiling %s for this machine, once", self.title)
                    self._compile(compiler, target)
        except OSError as error:
            raise BuildFailed(self, f"cannot write {target.parent}: {error.strerror}") from error
        return target

    def _compile(self, compiler: str, target: Path) -> None:
        """Compile in a temporary directory and rename, so that no process sees a partial library."""
        with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
            objects = {file: Path(scratch) / f"{file.stem}.o" for file in sorted(self.folder.glob("*.cpp"))}
            commands = [
                [compiler, *self._flags(), "-c", str(file), "-o", str(made)] for file, made in objects.items()
            ]
            with ThreadPoolExecutor(max_workers=min(len(commands), os.cpu_count() or 1)) as workers:
                list(workers.map(self._run, commands))
            linked = Path(scratch) / "linked.so"
            self._run([compiler, "-shared", "-o", str(linked), *map(str, objects.values())])
            # Renamed before its bytes are on the disk, it could be empty after a power loss.
            with linked.open("rb") as file:
                os.fsync(file.fileno())
            os.rename(linked, target)

    def _run(self, command: list[str]) -> None:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
            reason = lines[0] if lines else f"exit {done.returncode}"
            raise BuildFailed(self, f"{command[0]} failed: {reason}")

    def build_verbosely(self) -> int:
        """Build for the command line: print the result and return the exit code."""
        begin = time.perf_counter()
        try:
            path = self.build()
        except BuildFailed as error:
            print(f"{self.name}: {error}", file=sys.stderr)
            return 1
        print(f"{self.name}: {path} ({time.perf_counter() - begin:.1f} s)")
        return 0
