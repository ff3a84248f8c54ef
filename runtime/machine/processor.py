"""Name, instruction sets, cores and NUMA nodes of the processor."""

from __future__ import annotations

import math
import os
import platform
from pathlib import Path


def cpuinfo() -> dict[str, str]:
    """The first entry of /proc/cpuinfo; empty if there is no such file."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return {}
    rows = (line.partition(":") for line in text.split("\n\n")[0].splitlines())
    return {name.strip(): value.strip() for name, _, value in rows}


def instructions() -> frozenset[str]:
    """The instruction sets that the processor and the kernel support, such as avx2 or asimd."""
    info = cpuinfo()
    return frozenset((info.get("flags") or info.get("Features") or "").split())


def processor_name() -> str:
    """Model and instruction sets: code compiled for another processor may not run here."""
    info = cpuinfo()
    wanted = ("model name", "flags", "Features", "CPU part")
    return "\n".join([platform.machine(), *(info[name] for name in wanted if name in info)])


def usable_cores(cgroup: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Cores that this process may use: its affinity, and the quota of its container (cgroup v2)."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = cgroup.read_text().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else min(cores, math.ceil(int(quota) / int(period)))


def own_numa_nodes(nodes: Path = Path("/sys/devices/system/node")) -> list[int]:
    """The NUMA nodes whose processors this process may run on, ascending; empty: the kernel does not say."""
    cpus, found = os.sched_getaffinity(0), []
    for folder in nodes.glob("node[0-9]*"):
        try:
            ranges = (folder / "cpulist").read_text().strip()
        except OSError:
            continue
        if cpus.intersection(_cpus(ranges)):
            found.append(int(folder.name.removeprefix("node")))
    return sorted(found)


def _cpus(ranges: str) -> set[int]:
    """Parse the kernel's format, such as 0-3,8."""
    found: set[int] = set()
    for part in filter(None, ranges.split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found
