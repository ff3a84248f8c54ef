"""What the processor can do, as far as a choice depends on it."""

from __future__ import annotations

from functools import cache

from moonpool.runtime.machine.processor import instructions

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


@cache
def features() -> tuple[str, ...]:
    has = instructions()
    return tuple(name for name in _RELEVANT if name in has)


def has_amx() -> bool:
    """A matrix unit for bfloat16, which oneDNN drives and the compiled library does not."""
    return "amx_bf16" in features()
