"""What the processor can do, as far as a choice depends on it."""

from __future__ import annotations

from functools import cache
from pathlib import Path

# Of all a processor lists, those that the kernels or torch's own are written for.
_RELEVANT = (
    "avx2",
    "fma",
    "f16c",
    "avx512f",
    "avx512bw",
    "avx512vl",
    "avx512dq",
    "avx512_bf16",
    "avx512_fp16",
    "amx_bf16",
    "asimd",
    "bf16",
    "sve",
)


def cpuinfo() -> dict[str, str]:
    """The first processor's entry of /proc/cpuinfo; empty where there is none."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return {}
    rows = (line.partition(":") for line in text.split("\n\n")[0].splitlines())
    return {name.strip(): value.strip() for name, _, value in rows}


@cache
def features() -> tuple[str, ...]:
    info = cpuinfo()
    flags = set((info.get("flags") or info.get("Features") or "").split())
    return tuple(name for name in _RELEVANT if name in flags)


def has_amx() -> bool:
    """A matrix unit for bfloat16, which oneDNN drives and the compiled library does not."""
    return "amx_bf16" in features()
