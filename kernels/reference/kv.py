"""Writes of keys and values into the pool."""

from __future__ import annotations

import torch
from torch import Tensor

from moonpool.kernels.reference.dtypes import codes_and_scales, to_codes, to_compute_dtype, to_pool_dtype


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
    """Write k and v to the slots of the pool.

    k, v: [num_tokens, num_kv_heads, head_dim]; slot_mapping: int64 [num_tokens], -1 skips the token. A slot
    is ``block * block_size + offset``; two tokens of one call must not share one. A float8_e4m3fn pool stores
    k / k_scale and v / v_scale, rounded to nearest and clamped to ±448. An int8 pool stores codes and scales
    (``codes_and_scales``); it has no other scales.
    """
    block_size = pool.shape[4]
    used = slot_mapping >= 0
    slots = slot_mapping[used]
    blocks, offsets = slots // block_size, slots % block_size
    if pool.dtype == torch.int8:
        codes, scales = codes_and_scales(pool)
        for component, x in enumerate((k, v)):
            found = to_codes(x[used])
            codes[blocks, layer, component, :, offsets], scales[blocks, layer, component, :, offsets] = found
        return
    pool[blocks, layer, 0, :, offsets] = to_pool_dtype(k[used], k_scale, pool.dtype)
    pool[blocks, layer, 1, :, offsets] = to_pool_dtype(v[used], v_scale, pool.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of the first 2 * cos.shape[-1] dimensions (half-split); the others stay unchanged.

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
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> Tensor:
    """Normalize q and k (if norms are given), rotate them, and write k and v to the pool as ``write_kv``.

    qkv: [n, (num_heads + 2 * num_kv_heads) * head_dim], with num_heads 0 if there is no q; positions: int64
    [n]; cos, sin: float32 [max_position, rotary_dim / 2]; slot_mapping: int64 [n], -1 skips the write;
    q_norm, k_norm: [head_dim]. Returns q: [n, num_heads, head_dim].
    """
    heads = to_compute_dtype(qkv).view(qkv.shape[0], num_heads + 2 * num_kv_heads, head_dim)
    q, k, v = torch.split(heads, [num_heads, num_kv_heads, num_kv_heads], dim=1)
    if q_norm is not None:
        q = q * torch.rsqrt(q.square().mean(-1, keepdim=True) + eps) * to_compute_dtype(q_norm)
    if k_norm is not None:
        k = k * torch.rsqrt(k.square().mean(-1, keepdim=True) + eps) * to_compute_dtype(k_norm)
    cos, sin = cos[positions].to(heads.dtype), sin[positions].to(heads.dtype)
    write_kv(rotate(k, cos, sin), v, pool, layer, slot_mapping, k_scale=k_scale, v_scale=v_scale)
    return rotate(q, cos, sin).to(qkv.dtype)
