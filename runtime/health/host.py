"""Readings of a host: available memory, cores, network."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from moonpool.runtime.health.rapl import RaplWatch
from moonpool.runtime.health.readings import HostReading

_CGROUPS = Path("/sys/fs/cgroup")
_MEMORY_PRESSURE = Path("/proc/pressure/memory")


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """The memory limit of a container, at which the kernel kills a process of it."""

    directory: Path
    limit: str  # names of files
    used: str
    reclaimable: str  # a line of memory.stat

    def read(self) -> tuple[int, int] | None:
        """(available, limit) in bytes; None if there is no limit."""
        try:
            limit = int((self.directory / self.limit).read_text())
            used = int((self.directory / self.used).read_text())
            stat = (self.directory / "memory.stat").read_text().split()
        except (OSError, ValueError):  # "max" means no limit; groups may disappear
            return None
        cache = int(stat[stat.index(self.reclaimable) + 1]) if self.reclaimable in stat else 0
        return max(limit - used + cache, 0), limit


def memory_limits(cgroups: Path = _CGROUPS, own: Path = Path("/proc/self/cgroup")) -> list[MemoryLimit]:
    """The limits of all groups of this process that have one."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return []
    return [
        limit
        for line in lines
        for limit in _limits_of(cgroups, *line.split(":", 2)[1:])
        if limit.read() is not None
    ]


def _limits_of(cgroups: Path, controllers: str, path: str) -> Iterator[MemoryLimit]:
    if not controllers:
        root, names = cgroups, ("memory.max", "memory.current", "inactive_file")
    elif "memory" in controllers.split(","):
        root = cgroups / "memory"
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    else:
        return
    # In a container the path may be that of the host: then only the root exists, and it is the container's.
    own = root / path.lstrip("/")
    for directory in (own, *own.parents):
        if directory.is_relative_to(root):
            yield MemoryLimit(directory, *names)


def memory_stalled_s(pressure: Path = _MEMORY_PRESSURE) -> float | None:
    """Seconds since the start of the machine in which all processes with work waited for memory; None: the
    kernel does not count them. Source: the kernel's documentation of PSI, ``full``.
    """
    try:
        full = pressure.read_text().splitlines()[1].split()
        return int(full[-1].removeprefix("total=")) / 1e6
    except (OSError, IndexError, ValueError):
        return None


class HostWatch:
    """Reads the host; a reading takes some hundred microseconds."""

    def __init__(self) -> None:
        self._limits = memory_limits()
        self._process = psutil.Process()
        self._energy = RaplWatch()
        psutil.cpu_percent(None)  # the first call only starts the measurement

    def read(self) -> HostReading:
        memory = psutil.virtual_memory()
        known = [found for limit in self._limits if (found := limit.read()) is not None]
        available, total = min([(memory.available, memory.total), *known])
        interfaces = [
            counts
            for name, counts in psutil.net_io_counters(pernic=True, nowrap=False).items()
            if name != "lo"
        ]
        return HostReading(
            memory_available_nbytes=available,
            memory_nbytes=min(total, memory.total),
            cpu_ratio=psutil.cpu_percent(None) / 100,
            network_nbytes=sum(counts.bytes_sent + counts.bytes_recv for counts in interfaces),
            network_errors=sum(
                counts.errin + counts.errout + counts.dropin + counts.dropout for counts in interfaces
            ),
            open_files=self._process.num_fds(),
            max_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
            memory_stalled_s=memory_stalled_s(),
            energy_joules=self._energy.read(),
        )
