"""The C++ form of every operation: the signatures of ``moonpool.kernels.reference``, over raw addresses.

A decode step of a small model is hundreds of calls of a few microseconds each, so the Python code of a call
is minimal. Arguments are not checked; ``MOONPOOL_KERNELS=checked`` does that (``moonpool.kernels.checks``).
Calls that the library has no function for (mixed dtypes, non-contiguous tensors) use the torch form.
"""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor

from moonpool.kernels import reference
from moonpool.kernels.cpu.library import Library, load, view_of
from moonpool.kernels.reference import AttentionOptions, PrefillOptions

_library = load()
assert _library is not None, "import moonpool.kernels.cpu.operations only where the library loads"
LIBRARY: Library = _library

# Calls above these limits (about 100 µs) release the GIL: bytes of K and V of a decode, values of rows.
_MAX_GIL_HELD_NBYTES = 2 << 20
_MAX_GIL_HELD_VALUES = 1 << 18
# Of products with adapters: rows × ranks × (inputs + outputs).
_MAX_GIL_HELD_LORA = 1 << 20

# Rows (tokens × query heads of a kv head) of a sequence up to which decode is faster than prefill.
_MAX_DECODE_ROWS = 16

_rms_norm = LIBRARY.gil_held["rms_norm"]
_silu_mul = LIBRARY.gil_held["silu_mul"]
_argmax_rows = LIBRARY.gil_held["argmax_rows"]
_forbid_tokens = LIBRARY.gil_held["forbid_tokens"][None]
_write_kv = LIBRARY.gil_held["write_kv"]
_rotate_and_write = LIBRARY.gil_held["rotate_and_write"]
_decode = LIBRARY.gil_held["decode"]
_decode_gil_released = LIBRARY.gil_released["decode"]
_prefill = LIBRARY.gil_released["prefill"]
_merge = LIBRARY.gil_released["merge"]
_route_experts = LIBRARY.gil_held["route_experts"]
_group_by_expert = LIBRARY.gil_held["group_by_expert"][None]
_group_rows = LIBRARY.gil_held["group_rows"][None]
_group_rows_gil_released = LIBRARY.gil_released["group_rows"][None]
_combine_experts = LIBRARY.gil_held["combine_experts"]
_combine_experts_gil_released = LIBRARY.gil_released["combine_experts"]
_add_lora = LIBRARY.gil_held["add_lora"]
_add_lora_gil_released = LIBRARY.gil_released["add_lora"]

_empty_like = torch.empty_like


def _address(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, *, residual: Tensor | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    function = _rms_norm.get(x.dtype)
    if function is None or weight.dtype is not x.dtype or not x.is_contiguous():
        return reference.rms_norm(x, weight, eps, residual=residual)
    n, hidden = x.shape
    normed = _empty_like(x)
    total = None if residual is None else _empty_like(x)
    function(
        x.data_ptr(), _address(residual), weight.data_ptr(), normed.data_ptr(), _address(total),
        n, hidden, eps,
    )  # fmt: skip
    return normed if total is None else (normed, total)


def silu_mul(gate_up: Tensor) -> Tensor:
    function = _silu_mul.get(gate_up.dtype)
    if function is None or not gate_up.is_contiguous():
        return reference.silu_mul(gate_up)
    n, both = gate_up.shape
    out = gate_up.new_empty((n, both // 2))
    function(gate_up.data_ptr(), out.data_ptr(), n, both // 2)
    return out


def argmax_rows(logits: Tensor) -> Tensor:
    function = _argmax_rows.get(logits.dtype)
    if function is None or not logits.is_contiguous():
        return reference.argmax_rows(logits)
    n, vocab = logits.shape
    out = torch.empty(n, dtype=torch.int64)
    function(logits.data_ptr(), out.data_ptr(), n, vocab)
    return out


def forbid_tokens(scores: Tensor, masks: Tensor) -> None:
    if scores.dtype is not torch.float32 or not (scores.is_contiguous() and masks.is_contiguous()):
        reference.forbid_tokens(scores, masks)
        return
    _forbid_tokens(scores.data_ptr(), masks.data_ptr(), *scores.shape)


def write_kv(
    k: Tensor,
    v: Tensor,
    pool: Tensor,
    layer: int,
    slot_mapping: Tensor,
    *,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    view = view_of(pool)
    function = _write_kv.get((k.dtype, view.dtype))
    if function is None or not (k.is_contiguous() and v.is_contiguous()):
        reference.write_kv(k, v, pool, layer, slot_mapping, k_scale=k_scale, v_scale=v_scale)
        return
    function(
        k.data_ptr(), v.data_ptr(), view.address, layer, slot_mapping.data_ptr(),
        k.shape[0], 1 / k_scale, 1 / v_scale,
    )  # fmt: skip


def rotate_and_write(
    qkv: Tensor,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    pool: Tensor,
    layer: int,
    slot_mapping: Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> Tensor:
    view = view_of(pool)
    function = _rotate_and_write.get((qkv.dtype, view.dtype))
    mixed = k_norm is not None and k_norm.dtype is not qkv.dtype
    if function is None or mixed or not qkv.is_contiguous():
        return reference.rotate_and_write(
            qkv, positions, cos, sin, pool, layer, slot_mapping, num_heads=num_heads,
            num_kv_heads=num_kv_heads, head_dim=head_dim, q_norm=q_norm, k_norm=k_norm, eps=eps,
            k_scale=k_scale, v_scale=v_scale,
        )  # fmt: skip
    n = qkv.shape[0]
    q = qkv.new_empty((n, num_heads, head_dim))
    function(
        qkv.data_ptr(), positions.data_ptr(), cos.data_ptr(), sin.data_ptr(), cos.shape[1],
        view.address, layer, slot_mapping.data_ptr(), q.data_ptr(), n, num_heads,
        _address(q_norm), _address(k_norm), eps, 1 / k_scale, 1 / v_scale,
    )  # fmt: skip
    return q


def paged_decode_attention(
    q: Tensor,
    pool: Tensor,
    layer: int,
    block_table: Tensor,
    context_lens: Tensor,
    **options: Unpack[AttentionOptions],
) -> Tensor:
    view = view_of(pool)
    num_queries, num_heads = 1 if q.dim() == 3 else q.shape[1], q.shape[-2]
    most = _MAX_DECODE_ROWS * pool.shape[3]
    if num_queries > 1 and num_queries * num_heads > most:
        return _multi_query_decode(q, pool, layer, block_table, context_lens, **options)
    batch, max_blocks = block_table.shape
    is_long = batch * max_blocks * view.block_nbytes > _MAX_GIL_HELD_NBYTES
    function = (_decode_gil_released if is_long else _decode).get((q.dtype, view.dtype))
    if function is None or not q.is_contiguous():
        return reference.paged_decode_attention(q, pool, layer, block_table, context_lens, **options)
    out = options.get("out")
    if out is None:
        out = _empty_like(q)
    function(
        view.address, layer, q.data_ptr(), out.data_ptr(), _address(options.get("lse")),
        block_table.data_ptr(), block_table.stride(0), None, _address(options.get("q_positions")),
        context_lens.data_ptr(), batch, num_queries, num_heads, *_rules(options),
    )  # fmt: skip
    return out


def paged_prefill_attention(
    q: Tensor,
    pool: Tensor,
    layer: int,
    block_table: Tensor,
    cu_seqlens_q: Tensor,
    context_lens: Tensor,
    **options: Unpack[PrefillOptions],
) -> Tensor:
    view = view_of(pool)
    function = _prefill.get((q.dtype, view.dtype))
    if function is None or not q.is_contiguous():
        return reference.paged_prefill_attention(
            q, pool, layer, block_table, cu_seqlens_q, context_lens, **options
        )
    out = options.get("out")
    if out is None:
        out = _empty_like(q)
    num_heads, most = q.shape[1], _MAX_DECODE_ROWS * pool.shape[3]
    if 0 < options.get("max_q_len", 0) * num_heads <= most:
        _decode_gil_released[q.dtype, view.dtype](
            view.address, layer, q.data_ptr(), out.data_ptr(), _address(options.get("lse")),
            block_table.data_ptr(), block_table.stride(0), cu_seqlens_q.data_ptr(),
            _address(options.get("q_positions")), context_lens.data_ptr(), block_table.shape[0], 0, num_heads,
            *_rules(options),
        )  # fmt: skip
        return out
    function(
        view.address, layer, q.data_ptr(), out.data_ptr(), _address(options.get("lse")),
        block_table.data_ptr(), block_table.stride(0), cu_seqlens_q.data_ptr(),
        _address(options.get("q_positions")), context_lens.data_ptr(), block_table.shape[0], q.shape[1],
        *_rules(options),
    )  # fmt: skip
    return out


def _rules(options: AttentionOptions) -> tuple[float, float, int, float]:
    return (
        options["scale"] * options.get("k_scale", 1.0),
        options.get("v_scale", 1.0),
        options.get("window", 0),
        options.get("soft_cap", 0.0),
    )


def _multi_query_decode(
    q: Tensor, pool: Tensor, layer: int, table: Tensor, lens: Tensor, **options: Unpack[AttentionOptions]
) -> Tensor:
    """Prefill of a few tokens a sequence, which reads each key once for all of them."""
    batch, q_len, num_heads, head_dim = q.shape
    starts = torch.arange(0, batch * q_len + 1, q_len, dtype=torch.int32)
    out, lse = options.get("out"), options.get("lse")
    if out is None:
        out = q.new_empty(q.shape)
    options["out"] = out.view(-1, num_heads, head_dim)
    options["lse"] = None if lse is None else lse.view(-1, num_heads)
    queries = q.reshape(-1, num_heads, head_dim)
    paged_prefill_attention(queries, pool, layer, table, starts, lens, **options)
    return out


def merge_attention_states(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    function = _merge.get(outs.dtype)
    if function is None or not (outs.is_contiguous() and lses.is_contiguous()):
        return reference.merge_attention_states(outs, lses)
    parts, n, num_heads, head_dim = outs.shape
    out, lse = _empty_like(outs[0]), _empty_like(lses[0])
    function(outs.data_ptr(), lses.data_ptr(), out.data_ptr(), lse.data_ptr(), parts, n * num_heads, head_dim)
    return out, lse


def route_experts(logits: Tensor, k: int, *, renormalize: bool) -> tuple[Tensor, Tensor]:
    function = _route_experts.get(logits.dtype)
    if function is None or not logits.is_contiguous():
        return reference.route_experts(logits, k, renormalize=renormalize)
    n, num_experts = logits.shape
    weights = logits.new_empty((n, k), dtype=torch.float32)
    ids = logits.new_empty((n, k), dtype=torch.int32)
    function(logits.data_ptr(), weights.data_ptr(), ids.data_ptr(), n, num_experts, k, renormalize)
    return weights, ids


def group_by_expert(expert_ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    if not expert_ids.is_contiguous():
        expert_ids = expert_ids.contiguous()
    m = expert_ids.numel()
    order = expert_ids.new_empty(m, dtype=torch.int64)
    offsets = expert_ids.new_empty(num_experts + 1)
    _group_by_expert(expert_ids.data_ptr(), order.data_ptr(), offsets.data_ptr(), m, num_experts)
    return order, offsets


def group_rows(x: Tensor, order: Tensor, k: int) -> Tensor:
    if not x.is_contiguous():
        return reference.group_rows(x, order, k)
    m, width = order.shape[0], x.shape[1]
    out = x.new_empty((m, width))
    function = _group_rows_gil_released if m * width > _MAX_GIL_HELD_VALUES else _group_rows
    function(x.data_ptr(), order.data_ptr(), k, out.data_ptr(), m, width * x.element_size())
    return out


def combine_experts(rows: Tensor, order: Tensor, weights: Tensor) -> Tensor:
    is_long = rows.numel() > _MAX_GIL_HELD_VALUES
    function = (_combine_experts_gil_released if is_long else _combine_experts).get(rows.dtype)
    if function is None or not (rows.is_contiguous() and weights.is_contiguous()):
        return reference.combine_experts(rows, order, weights)
    n, k = weights.shape
    out = rows.new_empty((n, rows.shape[1]))
    function(rows.data_ptr(), order.data_ptr(), weights.data_ptr(), out.data_ptr(), n, k, rows.shape[1])
    return out


def add_lora(
    y: Tensor, x: Tensor, weights: Tensor, adapter_ids: Tensor, extents: Tensor, lines: Tensor, max_rank: int
) -> None:
    (n, ins), outs = x.shape, y.shape[1]
    is_long = n * max_rank * (ins + outs) > _MAX_GIL_HELD_LORA
    function = (_add_lora_gil_released if is_long else _add_lora).get(x.dtype)
    if function is None or not x.is_contiguous() or y.stride(1) != 1:
        reference.add_lora(y, x, weights, adapter_ids, extents, lines, max_rank)
        return
    function(
        y.data_ptr(), y.stride(0), x.data_ptr(), weights.data_ptr(), adapter_ids.data_ptr(),
        extents.data_ptr(), lines.data_ptr(), n, ins, outs, max_rank,
    )  # fmt: skip
