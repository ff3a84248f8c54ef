"""Instruction sets of the processor that the choice of a form depends on."""

from __future__ import annotations

from functools import cache

from moonpool.runtime.machine.processor import instructions


@cache
def has_amx() -> bool:
    """Whether there is a matrix unit for bfloat16, which oneDNN uses and the compiled library does not."""
    return "amx_bf16" in instructions()
