"""Attention over the paged pool."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.reference.wide import wide


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
