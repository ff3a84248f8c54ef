"""Attention over the paged pool."""

from __future__ import annotations

from typing import Required, TypedDict

import torch
from torch import Tensor

from moonpool.kernels.reference.dtypes import codes_and_scales, to_compute_dtype


class AttentionOptions(TypedDict, total=False):
    """The keyword arguments of both attentions, with the defaults and meanings of their signatures."""

    scale: Required[float]
    window: int
    soft_cap: float
    q_positions: Tensor | None
    k_scale: float
    v_scale: float
    key_only: int
    out: Tensor | None
    lse: Tensor | None


class PrefillOptions(AttentionOptions, total=False):
    """Those of prefill."""

    max_q_len: int


def _sequence_kv(
    pool: Tensor, layer: int, table: Tensor, first_token: int, end_token: int
) -> tuple[Tensor, Tensor]:
    """K and V of tokens first_token … end_token - 1: [num_kv_heads, tokens, head_dim] each."""
    block_size = pool.shape[4]
    first_block, end_block = first_token // block_size, -(-end_token // block_size)
    at = table[first_block:end_block].long(), layer  # → [blocks, 2, num_kv_heads, block_size, head_dim]
    if pool.dtype == torch.int8:
        codes, scales = codes_and_scales(pool)
        blocks = codes[at].float() * scales[at][..., None]
    else:
        blocks = pool[at]
    tokens = blocks.permute(1, 2, 0, 3, 4).flatten(2, 3)
    start = first_block * block_size
    return tuple(to_compute_dtype(tokens[:, :, first_token - start : end_token - start]).unbind(0))  # type: ignore[return-value]


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_start: int,
    key_start: int,
    scale: float,
    window: int,
    soft_cap: float,
) -> tuple[Tensor, Tensor]:
    """Causal attention of one sequence: out [queries, num_heads, head_dim] and lse [queries, num_heads].

    q: [queries, num_heads, head_dim] at positions query_start …; k, v: [num_kv_heads, keys, head_dim] at
    positions key_start ….
    """
    queries, num_heads, _ = q.shape
    num_kv_heads, keys, _ = k.shape
    grouped = to_compute_dtype(q).view(queries, num_kv_heads, num_heads // num_kv_heads, -1)
    scores = torch.einsum("qhgd,hkd->qhgk", grouped, k.to(grouped.dtype)) * scale
    if soft_cap > 0:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    query_at = torch.arange(query_start, query_start + queries, device=q.device)[:, None]
    key_at = torch.arange(key_start, key_start + keys, device=q.device)[None]
    seen = key_at <= query_at
    if window > 0:
        seen &= key_at > query_at - window
    scores = scores.masked_fill(~seen[:, None, None], float("-inf"))
    lse = scores.logsumexp(-1)
    weights = scores.softmax(-1).masked_fill(lse.isneginf()[..., None], 0.0)
    out = torch.einsum("qhgk,hkd->qhgd", weights, v.to(weights.dtype))
    return out.reshape(queries, num_heads, -1), lse.reshape(queries, num_heads)


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
    key_only: int = 0,
    max_q_len: int = 0,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> Tensor:
    """Causal attention of new tokens over cached and new ones, all of which are in the pool.

    q: [num_tokens, num_heads, head_dim], sequence after sequence; block_table: int32 [batch, max_blocks],
    padded with -1; cu_seqlens_q: int32 [batch + 1]; context_lens: int32 [batch], cached plus new tokens. A
    query at position p sees keys p - window + 1 … p (window 0: all up to p). Blocks before the window are not
    read and may be -1. q_positions: int32 [batch], the position of a sequence's first query among the tokens
    of its table; by default the last query is the last of them. (A rank with only some of a sequence's keys
    passes positions relative to its first key; a query at context_lens or beyond sees all of them.)
    max_q_len: most new tokens of a sequence, where that is known to be few (verification of proposed tokens);
    0: any number. With it a form may compute as in decode, and give its bits.

    The pool has the dtype of q, or is float8_e4m3fn with values multiplied by k_scale and v_scale, or
    is int8 with scales in the pool (``codes_and_scales``; only on CPUs). With
    ``key_only`` the caller uses the result from that element of each head on only: the first ones, which a
    latent has for scores, are undefined.

    Returns out (or a new tensor): [num_tokens, num_heads, head_dim]. lse: float32 [num_tokens, num_heads] is
    filled with the natural logarithm of each row's sum of exponentials. A query that sees no key gets zeros
    and -inf.
    """
    out = torch.empty_like(q) if out is None else out
    starts, lengths = cu_seqlens_q.tolist(), context_lens.tolist()
    for i, length in enumerate(lengths):
        start, end = starts[i], starts[i + 1]
        if start == end:
            continue
        first_query = length - (end - start) if q_positions is None else int(q_positions[i])
        first_key = min(length, max(0, first_query - window + 1)) if window > 0 else 0
        k, v = _sequence_kv(pool, layer, block_table[i], first_key, length)
        found, found_lse = _attend(
            q[start:end], k, v, first_query, first_key, scale * k_scale, window, soft_cap
        )
        out[start:end] = (found * v_scale).to(out.dtype)
        if lse is not None:
            lse[start:end] = found_lse
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
    q_positions: Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    key_only: int = 0,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> Tensor:
    """Attention of the last tokens of each sequence over its context, which includes them.

    q: [batch, num_heads, head_dim], or [batch, q_len, num_heads, head_dim] for the last q_len ≤ 16 tokens of
    each sequence (verification of speculated tokens); block_table: int32 [batch, max_blocks], padded with -1;
    context_lens: int32 [batch]. A context length of 0 (a padded batch) gives zeros, as does a query before
    the first token. Returns out (or a new tensor) of the shape of q. lse: float32 [batch, num_heads] or
    [batch, q_len, num_heads]. Everything else as in ``paged_prefill_attention``.
    """
    out = torch.empty_like(q) if out is None else out
    batch, num_heads, head_dim = q.shape[0], q.shape[-2], q.shape[-1]
    q_len = 1 if q.dim() == 3 else q.shape[1]
    starts = torch.arange(0, batch * q_len + 1, q_len, dtype=torch.int32)
    paged_prefill_attention(
        q.reshape(-1, num_heads, head_dim), pool, layer, block_table, starts, context_lens, scale=scale,
        window=window, soft_cap=soft_cap, q_positions=q_positions, k_scale=k_scale, v_scale=v_scale,
        out=out.view(-1, num_heads, head_dim), lse=None if lse is None else lse.view(-1, num_heads),
    )  # fmt: skip
    return out


def merge_attention_states(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Merge attentions over parts of the keys into one over all of them.

    outs: [parts, n, num_heads, head_dim]; lses: float32 [parts, n, num_heads], the natural logarithm of each
    part's sum of exponentials, -inf where it saw no key (its out is ignored). Returns out [n, num_heads,
    head_dim] in the dtype of outs, and its lse; a row that saw no key gets zeros.
    """
    lse = torch.logsumexp(to_compute_dtype(lses), 0)
    weights = (lses - lse.masked_fill(lse.isneginf(), 0.0)).exp()
    parts = to_compute_dtype(outs).masked_fill(lses.isneginf()[..., None], 0.0)
    return (parts * weights[..., None]).sum(0).to(outs.dtype), lse
