"""Name, instruction sets and cores of the processor."""

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
