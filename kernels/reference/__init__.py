"""Every operation in plain torch: the reference for tests, and the fallback where no fast form exists.

Arithmetic is float32 (float64 for float64 inputs) and rounded once, at the end. Unused slots of the pool are
sliced away before any arithmetic, so their content cannot affect a result.

The pool is ``[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]``: index 0 of the third
dimension is K, index 1 is V.
"""

from moonpool.kernels.reference.adapters import LINE_NBYTES, add_lora
from moonpool.kernels.reference.attention import (
    AttentionOptions,
    PrefillOptions,
    merge_attention_states,
    paged_decode_attention,
    paged_prefill_attention,
)
from moonpool.kernels.reference.checksums import checksum_spans
from moonpool.kernels.reference.dtypes import FP8, codes_and_scales, head_dim_of, to_codes, to_pool_dtype
from moonpool.kernels.reference.experts import (
    combine_experts,
    group_by_expert,
    group_rows,
    grouped_matmul,
    route_experts,
)
from moonpool.kernels.reference.kv import rotate, rotate_and_write, write_kv
from moonpool.kernels.reference.quantised import QuantisedWeight, quantised_matmul
from moonpool.kernels.reference.rows import argmax_rows, forbid_tokens, rms_norm, silu_mul

__all__ = [
    "FP8",
    "LINE_NBYTES",
    "AttentionOptions",
    "PrefillOptions",
    "QuantisedWeight",
    "add_lora",
    "argmax_rows",
    "checksum_spans",
    "codes_and_scales",
    "combine_experts",
    "forbid_tokens",
    "group_by_expert",
    "group_rows",
    "grouped_matmul",
    "head_dim_of",
    "merge_attention_states",
    "paged_decode_attention",
    "paged_prefill_attention",
    "quantised_matmul",
    "rms_norm",
    "rotate",
    "rotate_and_write",
    "route_experts",
    "silu_mul",
    "to_codes",
    "to_pool_dtype",
    "write_kv",
]
