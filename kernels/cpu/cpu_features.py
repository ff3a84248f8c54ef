"""Instruction sets of the processor that the kernels depend on."""

from __future__ import annotations

from functools import cache

from moonpool.runtime.machine.processor import instructions

# The instruction sets that the kernels, or torch's own, use.
_RELEVANT = (
    "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_bf16", "avx512_fp16",
    "avx512_vnni", "avx512vbmi",
    "amx_bf16", "asimd", "bf16", "sve",
)  # fmt: skip


@cache
def features() -> tuple[str, ...]:
    has = instructions()
    return tuple(name for name in _RELEVANT if name in has)


def has_amx() -> bool:
    """Whether there is a matrix unit for bfloat16, which oneDNN uses and the compiled library does not."""
    return "amx_bf16" in features()
