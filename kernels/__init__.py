"""Attention over the paged KV pool and related operations, each in the fastest form for its device.

``moonpool.kernels.reference`` documents the signatures. Names are resolved at first access: importing this
package loads neither torch nor the compiled library, so that ``python -m moonpool.kernels.cpu.build`` can
compile the library first.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moonpool.kernels.dispatch import (
        add_lora,
        argmax_rows,
        checksum_spans,
        combine_experts,
        group_by_expert,
        group_rows,
        grouped_matmul,
        merge_attention_states,
        paged_decode_attention,
        paged_prefill_attention,
        rms_norm,
        rotate_and_write,
        route_experts,
        silu_mul,
        write_kv,
    )
    from moonpool.kernels.packed import PackedExperts, PackedLinear
    from moonpool.kernels.quantised import Linear, QuantisedExperts, QuantisedLinear, linear_of
    from moonpool.kernels.reference.quantised import QuantisedWeight
    from moonpool.kernels.report import backend_report
    from moonpool.kernels.threads import get_num_threads, set_num_threads

__all__ = [
    "Linear",
    "PackedExperts",
    "PackedLinear",
    "QuantisedExperts",
    "QuantisedLinear",
    "QuantisedWeight",
    "add_lora",
    "argmax_rows",
    "backend_report",
    "checksum_spans",
    "combine_experts",
    "get_num_threads",
    "group_by_expert",
    "group_rows",
    "grouped_matmul",
    "linear_of",
    "merge_attention_states",
    "paged_decode_attention",
    "paged_prefill_attention",
    "rms_norm",
    "rotate_and_write",
    "route_experts",
    "set_num_threads",
    "silu_mul",
    "write_kv",
]

_ELSEWHERE = {
    "Linear": "moonpool.kernels.quantised",
    "PackedExperts": "moonpool.kernels.packed",
    "PackedLinear": "moonpool.kernels.packed",
    "QuantisedExperts": "moonpool.kernels.quantised",
    "QuantisedLinear": "moonpool.kernels.quantised",
    "QuantisedWeight": "moonpool.kernels.reference.quantised",
    "backend_report": "moonpool.kernels.report",
    "get_num_threads": "moonpool.kernels.threads",
    "linear_of": "moonpool.kernels.quantised",
    "set_num_threads": "moonpool.kernels.threads",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_ELSEWHERE.get(name, "moonpool.kernels.dispatch")), name)
    globals()[name] = value
    return value
