"""A limit on the memory of processes, by a control group of the kernel (version 1 or 2)."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_numbers = count(1)
_END_S = 10.0


@dataclass(frozen=True, slots=True)
class _Version:
    """Names of files and of lines in them. limits: the memory's first; where the others exist, swap is
    limited, too."""

    limits: Mapping[str, int]  # and the part of the limit that is written
    kills: str  # a file with a line "oom_kill N"
    counted: tuple[str, ...]  # lines of memory.stat: what cannot be given back but by swapping


_V1 = _Version(
    {"memory.limit_in_bytes": 1, "memory.memsw.limit_in_bytes": 1}, "memory.oom_control", ("rss", "shmem")
)
_V2 = _Version({"memory.max": 1, "memory.swap.max": 0}, "memory.events", ("anon", "shmem"))


class NoMemoryGroups(Exception):
    """This process may not make control groups of memory."""


class MemoryGroup:
    """Processes that may take ``limit_nbytes`` together; the kernel kills one of them for more.

    What a process took before it was added does not count.
    """

    def __init__(self, directory: Path, version: _Version, limit_nbytes: int) -> None:
        self.limit_nbytes = limit_nbytes
        self._directory = directory
        self._version = version

    def add(self, pid: int) -> None:
        """Move a process here; those that it starts from now on are here, too."""
        (self._directory / "cgroup.procs").write_text(str(pid))

    def used_nbytes(self) -> int:
        """Memory of the processes and shared memory that they touched first, without cached files."""
        lines = self._lines("memory.stat")
        return sum(lines[name] for name in self._version.counted)

    def num_killed(self) -> int:
        """Processes that the kernel has killed for the limit."""
        return self._lines(self._version.kills)["oom_kill"]

    def _lines(self, name: str) -> dict[str, int]:
        words = (line.split() for line in (self._directory / name).read_text().splitlines())
        return {key: int(value) for key, value in words}


@contextmanager
def memory_group(limit_nbytes: int) -> Iterator[MemoryGroup]:
    """Make a group for the block, inside the one of this process where version 1 is mounted, else beside it.
    Its processes must have ended by the block's end.

    Raises NoMemoryGroups.
    """
    parent, version = _parent()
    directory = parent / f"moonpool-{os.getpid()}-{next(_numbers)}"
    try:
        directory.mkdir()
    except OSError as error:
        raise NoMemoryGroups(f"{directory} cannot be made: {error.strerror}") from error
    try:
        try:
            for name, parts in version.limits.items():
                if (directory / name).exists():
                    (directory / name).write_text(str(parts * limit_nbytes))
            group = MemoryGroup(directory, version, limit_nbytes)
            group.num_killed()
        except OSError as error:
            raise NoMemoryGroups(f"{directory} takes no limit: {error.strerror}") from error
        yield group
    finally:
        _remove(directory)


def _remove(directory: Path) -> None:
    """Raises OSError where a process is still there after ``_END_S``."""
    until_s = time.monotonic() + _END_S
    while True:
        try:
            directory.rmdir()
            return
        except OSError:  # a killed process ends a moment later
            if time.monotonic() > until_s:
                raise
            time.sleep(0.02)


def _parent() -> tuple[Path, _Version]:
    own = {
        controllers: path.lstrip("/")
        for _, controllers, path in (
            line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()
        )
    }
    if "memory" in own:
        # In a container the path may be that of the host: then the root is the container's.
        inside = _ROOT / "memory" / own["memory"]
        return (inside if inside.is_dir() else _ROOT / "memory"), _V1
    if "" not in own:
        raise NoMemoryGroups("this system has no control groups of memory")
    # A group with processes can have no groups with limits inside, unless it is the root.
    here = _ROOT / own[""]
    return (here if here == _ROOT else here.parent), _V2
