"""What the processor says of itself."""

from __future__ import annotations

import platform
from pathlib import Path


def cpuinfo() -> dict[str, str]:
    """The first processor's entry of /proc/cpuinfo; empty where there is none."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return {}
    rows = (line.partition(":") for line in text.split("\n\n")[0].splitlines())
    return {name.strip(): value.strip() for name, _, value in rows}


def instructions() -> frozenset[str]:
    """The extensions it has and the kernel allows, such as avx2 or asimd."""
    info = cpuinfo()
    return frozenset((info.get("flags") or info.get("Features") or "").split())


def processor_name() -> str:
    """Its make and all its extensions: what is compiled for another one may not run here."""
    info = cpuinfo()
    wanted = ("model name", "flags", "Features", "CPU part")
    return "\n".join([platform.machine(), *(info[name] for name in wanted if name in info)])
