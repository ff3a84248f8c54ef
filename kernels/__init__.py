"""Attention over the paged KV pool, and the small operations around it, each in the fastest form of its device.

Signatures and their meaning are written once, in ``kernels.reference``.
"""

from __future__ import annotations

from kernels.linear import PackedLinear
from kernels.reference import (
    argmax_rows,
    paged_decode_attention,
    paged_prefill_attention,
    rms_norm,
    rotate_and_write,
    silu_mul,
    write_kv,
)
from kernels.report import backend_report

__all__ = [
    "PackedLinear",
    "argmax_rows",
    "backend_report",
    "paged_decode_attention",
    "paged_prefill_attention",
    "rms_norm",
    "rotate_and_write",
    "silu_mul",
    "write_kv",
]
