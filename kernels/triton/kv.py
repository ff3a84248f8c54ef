"""Triton forms of the operations that write K and V into the pool."""

# Triton is untyped, and its compile-time constants are capitals.
# mypy: disable-error-code="import-untyped,untyped-decorator,no-untyped-def"
# ruff: noqa: N803

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moonpool.kernels import reference
from moonpool.kernels.reference import FP8
from moonpool.kernels.triton.fp8 import as_bytes, narrowed
from moonpool.kernels.triton.launch import padded


@triton.jit
def slot_offset(slot, block_stride, BLOCK_SIZE: tl.constexpr, DIM: tl.constexpr):
    """Offset, in elements, of a slot's first value of kv head 0."""
    return slot // BLOCK_SIZE * block_stride + slot % BLOCK_SIZE * DIM


@triton.jit(do_not_specialize_on_alignment=["slots"])
def write_token(
    k, v, pool, slots, layer_offset, block_stride, kv_stride, head_stride, k_factor, v_factor,
    HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, WIDTH: tl.constexpr,
    FP8: tl.constexpr,
):  # fmt: skip
    """Grid: (num_tokens,). k, v: [num_tokens, HEADS, DIM]; k_factor, v_factor: factors of a float8 pool's
    values."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if slot < 0:
        return
    lane = tl.arange(0, WIDTH)
    there = lane < HEADS * DIM
    to = pool + layer_offset + slot_offset(slot, block_stride, BLOCK_SIZE, DIM)
    to += (lane // DIM).to(tl.int64) * head_stride + lane % DIM
    source = token * HEADS * DIM + lane
    key = tl.load(k + source, mask=there).to(tl.float32)
    value = tl.load(v + source, mask=there).to(tl.float32)
    tl.store(to, narrowed(key, k_factor, pool.dtype.element_ty, FP8), mask=there)
    tl.store(to + kv_stride, narrowed(value, v_factor, pool.dtype.element_ty, FP8), mask=there)


@triton.jit
def norm_weights(q_norm, k_norm, at, there, is_q, normed, NORM_Q: tl.constexpr, NORM_K: tl.constexpr):
    """Norm weights of the values at ``at`` of each head: [heads, n], 1 for a head without a norm."""
    of_q = tl.full(at.shape, 1.0, tl.float32)
    of_k = of_q
    if NORM_Q:
        of_q = tl.load(q_norm + at, mask=there, other=0.0).to(tl.float32)
    if NORM_K:
        of_k = tl.load(k_norm + at, mask=there, other=0.0).to(tl.float32)
    return tl.where(normed[:, None], tl.where(is_q[:, None], of_q[None, :], of_k[None, :]), 1.0)


@triton.jit(do_not_specialize_on_alignment=["positions", "slots"])
def rotate_heads(
    qkv, positions, cos, sin, pool, slots, q, q_norm, k_norm, layer_offset, block_stride, kv_stride,
    head_stride, eps, k_factor, v_factor,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr,
    HALF_PADDED: tl.constexpr, REST_PADDED: tl.constexpr, BLOCK_SIZE: tl.constexpr, NORM_Q: tl.constexpr,
    NORM_K: tl.constexpr, FP8: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """TILE heads of one token, from its q, k and v heads in this order. Grid: (num_tokens, tiles of TILE).

    A head is its first half, its second half and the rest, which is not rotated. k_factor, v_factor: factors
    of a float8 pool's values.
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * TILE + tl.arange(0, TILE)
    slot = tl.load(slots + token)
    is_q = head < HEADS
    is_v = (head >= HEADS + KV_HEADS) & (head < HEADS + 2 * KV_HEADS)
    rotated = head < HEADS + KV_HEADS
    stored = (head >= HEADS) & (head < HEADS + 2 * KV_HEADS) & (slot >= 0)

    lane, rest_lane = tl.arange(0, HALF_PADDED), tl.arange(0, REST_PADDED)
    there, rest_there = lane < HALF, rest_lane < DIM - 2 * HALF
    source = qkv + ((token * (HEADS + 2 * KV_HEADS) + head) * DIM)[:, None]
    wanted = (is_q | stored)[:, None]
    first = tl.load(source + lane[None, :], mask=wanted & there[None, :], other=0.0).to(tl.float32)
    second = tl.load(source + HALF + lane[None, :], mask=wanted & there[None, :], other=0.0).to(tl.float32)
    rest = tl.load(source + 2 * HALF + rest_lane[None, :], mask=wanted & rest_there[None, :], other=0.0)
    rest = rest.to(tl.float32)

    if NORM_Q or NORM_K:
        squares = tl.sum(first * first, 1) + tl.sum(second * second, 1) + tl.sum(rest * rest, 1)
        normed = (is_q & NORM_Q) | (~is_q & rotated & NORM_K)
        scale = tl.where(normed, tl.rsqrt(squares / DIM + eps), 1.0)[:, None]
        first *= scale * norm_weights(q_norm, k_norm, lane, there, is_q, normed, NORM_Q, NORM_K)
        second *= scale * norm_weights(q_norm, k_norm, HALF + lane, there, is_q, normed, NORM_Q, NORM_K)
        last = 2 * HALF + rest_lane
        rest *= scale * norm_weights(q_norm, k_norm, last, rest_there, is_q, normed, NORM_Q, NORM_K)
    angle = tl.load(positions + token) * HALF + lane
    c = tl.load(cos + angle, mask=there, other=0.0)[None, :]
    s = tl.load(sin + angle, mask=there, other=0.0)[None, :]
    one = tl.where(rotated[:, None], first * c - second * s, first)
    other = tl.where(rotated[:, None], second * c + first * s, second)

    to = q + ((token * HEADS + head) * DIM)[:, None]
    half_q, rest_q = is_q[:, None] & there[None, :], is_q[:, None] & rest_there[None, :]
    tl.store(to + lane[None, :], one.to(q.dtype.element_ty), mask=half_q)
    tl.store(to + HALF + lane[None, :], other.to(q.dtype.element_ty), mask=half_q)
    tl.store(to + 2 * HALF + rest_lane[None, :], rest.to(q.dtype.element_ty), mask=rest_q)
    kv_head = (head - HEADS - tl.where(is_v, KV_HEADS, 0)).to(tl.int64)
    offset = slot_offset(slot, block_stride, BLOCK_SIZE, DIM) + kv_head * head_stride
    into = pool + layer_offset + (offset + tl.where(is_v, kv_stride, 0))[:, None]
    factor = tl.where(is_v, v_factor, k_factor)[:, None]
    half_kv, rest_kv = stored[:, None] & there[None, :], stored[:, None] & rest_there[None, :]
    kind = pool.dtype.element_ty
    tl.store(into + lane[None, :], narrowed(one, factor, kind, FP8), mask=half_kv)
    tl.store(into + HALF + lane[None, :], narrowed(other, factor, kind, FP8), mask=half_kv)
    tl.store(into + 2 * HALF + rest_lane[None, :], narrowed(rest, factor, kind, FP8), mask=rest_kv)


HEADS_PER_PROGRAM = 8


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
    """As ``reference.write_kv``."""
    num_tokens, num_kv_heads, head_dim = k.shape
    if not (k.is_contiguous() and v.is_contiguous()):
        k, v = k.contiguous(), v.contiguous()
    if num_tokens:
        strides = pool.stride()
        write_token[(num_tokens,)](
            k, v, as_bytes(pool), slot_mapping, layer * strides[1], strides[0], strides[2], strides[3],
            1 / k_scale, 1 / v_scale,
            HEADS=num_kv_heads, DIM=head_dim, BLOCK_SIZE=pool.shape[4],
            WIDTH=padded(num_kv_heads * head_dim), FP8=pool.dtype == FP8, num_warps=4,
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
    """As ``reference.rotate_and_write``."""
    n, half = qkv.shape[0], cos.shape[1]
    if pool.dtype not in (qkv.dtype, FP8) or not qkv.is_contiguous():
        return reference.rotate_and_write(
            qkv, positions, cos, sin, pool, layer, slot_mapping, num_heads=num_heads,
            num_kv_heads=num_kv_heads, head_dim=head_dim, q_norm=q_norm, k_norm=k_norm, eps=eps,
            k_scale=k_scale, v_scale=v_scale,
        )  # fmt: skip
    q = torch.empty((n, num_heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    if n:
        strides = pool.stride()
        rotate_heads[(n, triton.cdiv(num_heads + 2 * num_kv_heads, HEADS_PER_PROGRAM))](
            qkv, positions, cos, sin, as_bytes(pool), slot_mapping, q, qkv if q_norm is None else q_norm,
            qkv if k_norm is None else k_norm, layer * strides[1], strides[0], strides[2], strides[3],
            eps, 1 / k_scale, 1 / v_scale,
            HEADS=num_heads, KV_HEADS=num_kv_heads, DIM=head_dim, HALF=half, HALF_PADDED=padded(half),
            REST_PADDED=padded(max(1, head_dim - 2 * half)), BLOCK_SIZE=pool.shape[4],
            NORM_Q=q_norm is not None, NORM_K=k_norm is not None, FP8=pool.dtype == FP8,
            TILE=HEADS_PER_PROGRAM, num_warps=4,
        )  # fmt: skip
    return q
