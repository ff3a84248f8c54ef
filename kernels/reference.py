"""Every operation in plain torch: what the fast forms are tested against, and what runs where there is none.

Written to be read. Arithmetic is float32 (float64 where the inputs are float64) and rounded once, at the end.
Unused slots of the pool are sliced away before any arithmetic, so whatever lies there cannot leak into a
result.

The pool is ``[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]``: index 0 of the third
dimension is K, index 1 is V.
"""

from __future__ import annotations

from typing import overload

import torch
import torch.nn.functional as F
from torch import Tensor


def wide(x: Tensor) -> Tensor:
    """``x`` in the dtype it is computed in: float64 stays, everything else becomes float32."""
    return x if x.dtype == torch.float64 else x.float()


@overload
def rms_norm(x: Tensor, weight: Tensor, eps: float, *, residual: None = None) -> Tensor: ...
@overload
def rms_norm(x: Tensor, weight: Tensor, eps: float, *, residual: Tensor) -> tuple[Tensor, Tensor]: ...
def rms_norm(
    x: Tensor, weight: Tensor, eps: float, *, residual: Tensor | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    """x: [n, hidden]; weight: [hidden]; residual: [n, hidden].

    Returns the normed x, or with a residual ``(normed(x + residual), x + residual)``; the sum is rounded to
    the dtype of x before it is normed, as it is when it travels on to the next layer.
    """
    total = x if residual is None else (wide(x) + wide(residual)).to(x.dtype)
    values = wide(total)
    scale = torch.rsqrt(values.square().mean(-1, keepdim=True) + eps)
    normed = (values * scale * wide(weight)).to(x.dtype)
    return normed if residual is None else (normed, total)


def silu_mul(gate_up: Tensor) -> Tensor:
    """gate_up: [n, 2 * inter], gate first. Returns silu(gate) * up: [n, inter]."""
    gate, up = wide(gate_up).chunk(2, dim=-1)
    return (F.silu(gate) * up).to(gate_up.dtype)


def argmax_rows(logits: Tensor) -> Tensor:
    """logits: [n, vocab]. Returns int64 [n]; the first of equal values wins, and a NaN beats every number."""
    return logits.argmax(-1)


def write_kv(k: Tensor, v: Tensor, pool: Tensor, layer: int, slot_mapping: Tensor) -> None:
    """k, v: [num_tokens, num_kv_heads, head_dim]; slot_mapping: int64 [num_tokens], -1 skips the token.

    A slot is ``block * block_size + offset``. Two tokens of one call must not share a slot.
    """
    block_size = pool.shape[4]
    kept = slot_mapping >= 0
    slots = slot_mapping[kept]
    blocks, offsets = slots // block_size, slots % block_size
    pool[blocks, layer, 0, :, offsets] = k[kept].to(pool.dtype)
    pool[blocks, layer, 1, :, offsets] = v[kept].to(pool.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of the first 2 * cos.shape[-1] dimensions (half-split); the rest passes through.

    x: [n, heads, head_dim]; cos, sin: [n, rotary_dim / 2].
    """
    half = cos.shape[-1]
    cos, sin = cos[:, None], sin[:, None]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


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
) -> Tensor:
    """Norm (where asked) and rotate q and k, write k and v to the pool.

    qkv: [n, (num_heads + 2 * num_kv_heads) * head_dim]; positions: int64 [n]; cos, sin: float32
    [max_position, rotary_dim / 2]; slot_mapping: int64 [n], -1 skips the write; q_norm, k_norm: [head_dim].
    Returns q: [n, num_heads, head_dim].
    """
    heads = wide(qkv).view(qkv.shape[0], num_heads + 2 * num_kv_heads, head_dim)
    q, k, v = torch.split(heads, [num_heads, num_kv_heads, num_kv_heads], dim=1)
    if q_norm is not None:
        q = q * torch.rsqrt(q.square().mean(-1, keepdim=True) + eps) * wide(q_norm)
    if k_norm is not None:
        k = k * torch.rsqrt(k.square().mean(-1, keepdim=True) + eps) * wide(k_norm)
    cos, sin = cos[positions].to(heads.dtype), sin[positions].to(heads.dtype)
    write_kv(rotate(k, cos, sin), v, pool, layer, slot_mapping)
    return rotate(q, cos, sin).to(qkv.dtype)


def _sequence_kv(
    pool: Tensor, layer: int, table: Tensor, first_token: int, end_token: int
) -> tuple[Tensor, Tensor]:
    """K and V of tokens first_token … end_token - 1 of one sequence: [num_kv_heads, tokens, head_dim]
    each."""
    block_size = pool.shape[4]
    first_block, end_block = first_token // block_size, -(-end_token // block_size)
    blocks = pool[
        table[first_block:end_block].long(), layer
    ]  # [blocks, 2, num_kv_heads, block_size, head_dim]
    tokens = blocks.permute(1, 2, 0, 3, 4).flatten(2, 3)
    start = first_block * block_size
    return tuple(wide(tokens[:, :, first_token - start : end_token - start]).unbind(0))  # type: ignore[return-value]


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_start: int,
    key_start: int,
    scale: float,
    window: int,
    soft_cap: float,
) -> Tensor:
    """q: [queries, num_heads, head_dim] at positions query_start …; k, v: [num_kv_heads, keys, head_dim] at
    positions key_start …. Returns float [queries, num_heads, head_dim]."""
    queries, num_heads, _ = q.shape
    num_kv_heads, keys, _ = k.shape
    grouped = wide(q).view(queries, num_kv_heads, num_heads // num_kv_heads, -1)
    scores = torch.einsum("qhgd,hkd->qhgk", grouped, k) * scale
    if soft_cap > 0:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    query_at = torch.arange(query_start, query_start + queries, device=q.device)[:, None]
    key_at = torch.arange(key_start, key_start + keys, device=q.device)[None]
    seen = key_at <= query_at
    if window > 0:
        seen &= key_at > query_at - window
    scores = scores.masked_fill(~seen[:, None, None], float("-inf"))
    return torch.einsum("qhgk,hkd->qhgd", scores.softmax(-1), v).reshape(queries, num_heads, -1)


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
    out: Tensor | None = None,
) -> Tensor:
    """Causal attention of new tokens over cached and new ones, which have been written to the pool before.

    q: [num_tokens, num_heads, head_dim], sequence after sequence; block_table: int32 [batch, max_blocks],
    padded with -1; cu_seqlens_q: int32 [batch + 1]; context_lens: int32 [batch], cached plus new tokens. The
    last query of a sequence sees its whole context; a query at position p sees keys p - window + 1 … p
    (window 0: all up to p). Blocks that lie wholly before the window are not read, and may be -1. Returns out
    (or a new tensor): [num_tokens, num_heads, head_dim].
    """
    out = torch.empty_like(q) if out is None else out
    starts, lengths = cu_seqlens_q.tolist(), context_lens.tolist()
    for i, length in enumerate(lengths):
        start, end = starts[i], starts[i + 1]
        if start == end:
            continue
        first_query = length - (end - start)
        first_key = max(0, first_query - window + 1) if window > 0 else 0
        k, v = _sequence_kv(pool, layer, block_table[i], first_key, length)
        out[start:end] = _attend(q[start:end], k, v, first_query, first_key, scale, window, soft_cap).to(
            out.dtype
        )
    return out


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
    out: Tensor | None = None,
) -> Tensor:
    """Attention of one query token a sequence over its context, the token itself included (already written).

    q: [batch, num_heads, head_dim]; block_table: int32 [batch, max_blocks], padded with -1; context_lens:
    int32 [batch]. A row of context length 0 (a padded batch) gives zeros. Returns out (or a new tensor):
    [batch, num_heads, head_dim].
    """
    out = torch.empty_like(q) if out is None else out
    for i, length in enumerate(context_lens.tolist()):
        if length == 0:
            out[i] = 0
            continue
        first_key = max(0, length - window) if window > 0 else 0
        k, v = _sequence_kv(pool, layer, block_table[i], first_key, length)
        out[i] = _attend(q[i : i + 1], k, v, length - 1, first_key, scale, window, soft_cap)[0].to(out.dtype)
    return out


def merge_attention_states(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """One attention over all keys, out of attentions over parts of them.

    outs: [parts, n, num_heads, head_dim]; lses: float32 [parts, n, num_heads], the natural logarithm of each
    part's sum of exponentials, -inf where it saw no key (its out is then not looked at). Returns out [n,
    num_heads, head_dim] in the dtype of outs, and its lse; a row that saw nothing gives zeros.
    """
    lse = torch.logsumexp(wide(lses), 0)
    weights = (lses - lse.masked_fill(lse.isneginf(), 0.0)).exp()
    parts = wide(outs).masked_fill(lses.isneginf()[..., None], 0.0)
    return (parts * weights[..., None]).sum(0).to(outs.dtype), lse


def gather_blocks(pool: Tensor, block_ids: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Copies of blocks, one after the other: [n, *pool.shape[1:]]. block_ids: int64 [n]; pool: contiguous."""
    return torch.index_select(pool, 0, block_ids, out=out)


def scatter_blocks(blocks: Tensor, pool: Tensor, block_ids: Tensor) -> None:
    """The reverse: block i of ``blocks`` goes to block_ids[i]. No block may be named twice."""
    pool.index_copy_(0, block_ids, blocks)


def copy_blocks(pool: Tensor, source_ids: Tensor, target_ids: Tensor) -> None:
    """Block source_ids[i] goes to target_ids[i]; no target may be named twice, or be a source of this
    call."""
    pool.index_copy_(0, target_ids, pool.index_select(0, source_ids))
