"""The C++ form of every operation: the same signatures as ``moonpool.kernels.reference``, over raw addresses.

A decode step of a small model is hundreds of such calls of a few microseconds each, so the Python around a
call is kept to what must be done. Shapes are the caller's promise; ``MOONPOOL_KERNELS=checked`` verifies
every one (``moonpool.kernels.checks``). What the library has no form for (mixed dtypes, other
devices) takes the torch
form.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moonpool.kernels import reference
from moonpool.kernels.cpu.library import Library, load, view_of

_library = load()
assert _library is not None, "import moonpool.kernels.cpu.operations only where the library loads"
LIBRARY: Library = _library

# A decode over more bytes of K and V than this (about 100 µs) gives Python's global lock up.
_LONG_NBYTES = 2 << 20

_rms_norm = LIBRARY.held["rms_norm"]
_silu_mul = LIBRARY.held["silu_mul"]
_argmax_rows = LIBRARY.held["argmax_rows"]
_write_kv = LIBRARY.held["write_kv"]
_rotate_and_write = LIBRARY.held["rotate_and_write"]
_decode = LIBRARY.held["decode"]
_decode_long = LIBRARY.freed["decode"]
_prefill = LIBRARY.freed["prefill"]
_merge = LIBRARY.freed["merge"]

_empty_like = torch.empty_like


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, *, residual: Tensor | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    function = _rms_norm.get(x.dtype)
    if function is None or weight.dtype is not x.dtype or not x.is_contiguous():
        return reference.rms_norm(x, weight, eps, residual=residual)
    n, hidden = x.shape
    normed = _empty_like(x)
    if residual is None:
        function(x.data_ptr(), None, weight.data_ptr(), normed.data_ptr(), None, n, hidden, eps)
        return normed
    total = _empty_like(x)
    function(
        x.data_ptr(),
        residual.data_ptr(),
        weight.data_ptr(),
        normed.data_ptr(),
        total.data_ptr(),
        n,
        hidden,
        eps,
    )
    return normed, total


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
        k.data_ptr(),
        v.data_ptr(),
        view.address,
        layer,
        slot_mapping.data_ptr(),
        k.shape[0],
        1 / k_scale,
        1 / v_scale,
    )


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
    if function is None or not qkv.is_contiguous():
        return reference.rotate_and_write(
            qkv,
            positions,
            cos,
            sin,
            pool,
            layer,
            slot_mapping,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            q_norm=q_norm,
            k_norm=k_norm,
            eps=eps,
            k_scale=k_scale,
            v_scale=v_scale,
        )
    n = qkv.shape[0]
    q = qkv.new_empty((n, num_heads, head_dim))
    function(
        qkv.data_ptr(),
        positions.data_ptr(),
        cos.data_ptr(),
        sin.data_ptr(),
        cos.shape[1],
        view.address,
        layer,
        slot_mapping.data_ptr(),
        q.data_ptr(),
        n,
        num_heads,
        None if q_norm is None else q_norm.data_ptr(),
        None if k_norm is None else k_norm.data_ptr(),
        eps,
        1 / k_scale,
        1 / v_scale,
    )
    return q


def paged_decode_attention(
    q: Tensor,
    pool: Tensor,
    layer: int,
    block_table: Tensor,
    context_lens: Tensor,
    *,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
    q_positions: Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> Tensor:
    if q.dim() == 4:
        return _decode_of_several(
            q, pool, layer, block_table, context_lens, scale=scale, window=window, soft_cap=soft_cap,
            q_positions=q_positions, k_scale=k_scale, v_scale=v_scale, out=out, lse=lse,
        )  # fmt: skip
    view = view_of(pool)
    batch, max_blocks = block_table.shape
    long = batch * max_blocks * view.block_nbytes > _LONG_NBYTES
    function = (_decode_long if long else _decode).get((q.dtype, view.dtype))
    if function is None or not q.is_contiguous():
        return reference.paged_decode_attention(
            q, pool, layer, block_table, context_lens, scale=scale, window=window, soft_cap=soft_cap,
            q_positions=q_positions, k_scale=k_scale, v_scale=v_scale, out=out, lse=lse,
        )  # fmt: skip
    if out is None:
        out = _empty_like(q)
    function(
        view.address,
        layer,
        q.data_ptr(),
        out.data_ptr(),
        None if lse is None else lse.data_ptr(),
        block_table.data_ptr(),
        block_table.stride(0),
        None if q_positions is None else q_positions.data_ptr(),
        context_lens.data_ptr(),
        batch,
        q.shape[1],
        scale * k_scale,
        v_scale,
        window,
        soft_cap,
    )
    return out


def _decode_of_several(
    q: Tensor, pool: Tensor, layer: int, block_table: Tensor, context_lens: Tensor, **rules: Any
) -> Tensor:
    """A few tokens a sequence go as short chunks, whose keys are read once for all of them."""
    batch, q_len, num_heads, head_dim = q.shape
    starts = torch.arange(0, batch * q_len + 1, q_len, dtype=torch.int32)
    out, lse = rules.pop("out"), rules.pop("lse")
    found = paged_prefill_attention(
        q.reshape(-1, num_heads, head_dim),
        pool,
        layer,
        block_table,
        starts,
        context_lens,
        out=None if out is None else out.view(-1, num_heads, head_dim),
        lse=None if lse is None else lse.view(-1, num_heads),
        **rules,
    )
    return found.view(q.shape) if out is None else out


def paged_prefill_attention(
    q: Tensor,
    pool: Tensor,
    layer: int,
    block_table: Tensor,
    cu_seqlens_q: Tensor,
    context_lens: Tensor,
    *,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
    q_positions: Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> Tensor:
    view = view_of(pool)
    function = _prefill.get((q.dtype, view.dtype))
    if function is None or not q.is_contiguous():
        return reference.paged_prefill_attention(
            q, pool, layer, block_table, cu_seqlens_q, context_lens, scale=scale, window=window,
            soft_cap=soft_cap, q_positions=q_positions, k_scale=k_scale, v_scale=v_scale, out=out, lse=lse,
        )  # fmt: skip
    if out is None:
        out = _empty_like(q)
    function(
        view.address,
        layer,
        q.data_ptr(),
        out.data_ptr(),
        None if lse is None else lse.data_ptr(),
        block_table.data_ptr(),
        block_table.stride(0),
        cu_seqlens_q.data_ptr(),
        None if q_positions is None else q_positions.data_ptr(),
        context_lens.data_ptr(),
        block_table.shape[0],
        q.shape[1],
        scale * k_scale,
        v_scale,
        window,
        soft_cap,
    )
    return out


def merge_attention_states(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    function = _merge.get(outs.dtype)
    if function is None or not (outs.is_contiguous() and lses.is_contiguous()):
        return reference.merge_attention_states(outs, lses)
    parts, n, num_heads, head_dim = outs.shape
    out, lse = _empty_like(outs[0]), _empty_like(lses[0])
    function(outs.data_ptr(), lses.data_ptr(), out.data_ptr(), lse.data_ptr(), parts, n * num_heads, head_dim)
    return out, lse
