"""What the fast forms take on trust, verified: shapes, dtypes, contiguity, and every index that reaches
memory.

``MOONPOOL_KERNELS=checked`` puts these in front of every operation. That costs many times the operation
itself: it is for tests and for finding the caller that broke its promise.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from itertools import pairwise
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from moonpool.kernels.checks import experts as expert_checks
from moonpool.kernels.checks.require import KernelMisuse, require, require_tensor
from moonpool.kernels.reference.pool_dtype import FP8

__all__ = ["KernelMisuse", "checked"]

Form = TypeVar("Form", bound=Callable[..., Any])


def _pool(pool: Tensor, layer: int) -> None:
    require(pool.dim() == 6 and pool.shape[2] == 2, f"a pool has six dimensions, got {list(pool.shape)}")
    contiguous = pool.stride(5) == 1 and pool.stride(4) == pool.shape[5]
    require(contiguous, f"the pool's last two dimensions must be contiguous, got strides {pool.stride()}")
    require(0 <= layer < pool.shape[1], f"layer {layer} is not one of the pool's {pool.shape[1]}")


def _slots(slot_mapping: Tensor, pool: Tensor, n: int) -> None:
    require_tensor("slot_mapping", slot_mapping, torch.int64, n)
    num_slots = pool.shape[0] * pool.shape[4]
    require(bool((slot_mapping < num_slots).all()), f"a slot lies beyond the pool's {num_slots}")
    used = [slot for slot in slot_mapping.tolist() if slot >= 0]
    require(len(set(used)) == len(used), "two tokens share a slot")


def _table(block_table: Tensor, pool: Tensor, context_lens: Tensor, seen_from: list[int]) -> None:
    """Every block of tokens seen_from[i] … context_lens[i] - 1 must be in the pool."""
    require(block_table.dtype == torch.int32, f"block_table must be int32, is {block_table.dtype}")
    require(block_table.stride(1) == 1, "a row of block_table must be contiguous")
    require_tensor("context_lens", context_lens, torch.int32, block_table.shape[0])
    num_blocks, block_size = pool.shape[0], pool.shape[4]
    for i, length in enumerate(context_lens.tolist()):
        wanted = -(-length // block_size)
        require(
            wanted <= block_table.shape[1], f"sequence {i} of {length} tokens has too few blocks in its table"
        )
        row = block_table[i, seen_from[i] // block_size : wanted]
        inside = bool(((row >= 0) & (row < num_blocks)).all())
        require(inside, f"sequence {i} names a block outside of the pool: {row.tolist()}")


def _dtypes(name: str, x: Tensor, pool: Tensor, k_scale: float, v_scale: float) -> None:
    if pool.dtype == FP8:
        require(x.dtype in (torch.float32, torch.bfloat16, torch.float16), f"{name} is {x.dtype}")
        require(k_scale > 0 and v_scale > 0, f"scales must be positive, are {k_scale} and {v_scale}")
    else:
        require(x.dtype == pool.dtype, f"{name} must be {pool.dtype} as the pool, is {x.dtype}")
        require(k_scale == v_scale == 1.0, f"a pool of {pool.dtype} has no scales")


def _heads(q: Tensor, pool: Tensor) -> None:
    require(q.shape[-1] == pool.shape[5], f"q must be [n, heads, head_dim], is {list(q.shape)}")
    require(q.is_contiguous(), f"q must be contiguous, has strides {q.stride()}")
    require(q.shape[-2] % pool.shape[3] == 0, f"{q.shape[-2]} heads over {pool.shape[3]} kv heads")


def _queries(
    q: Tensor,
    pool: Tensor,
    block_table: Tensor,
    context_lens: Tensor,
    counts: list[int],
    window: int,
    q_positions: Tensor | None,
    out: Tensor | None,
    lse: Tensor | None,
) -> None:
    """counts: queries of each sequence."""
    if q_positions is not None:
        require_tensor("q_positions", q_positions, torch.int32, len(counts))
    seen_from = []
    for i, (count, length) in enumerate(zip(counts, context_lens.tolist(), strict=True)):
        position = length - count if q_positions is None else int(q_positions[i])
        seen_from.append(min(length, max(0, position - window + 1)) if window else 0)
    _table(block_table, pool, context_lens, seen_from)
    if out is not None:
        require_tensor("out", out, q.dtype, *q.shape)
    if lse is not None:
        require_tensor("lse", lse, torch.float32, *q.shape[:-1])


def _check_rms_norm(x: Tensor, weight: Tensor, eps: float, *, residual: Tensor | None = None) -> None:
    require_tensor("x", x, x.dtype, *x.shape[:1], weight.shape[0])
    require_tensor("weight", weight, x.dtype, x.shape[1])
    if residual is not None:
        require_tensor("residual", residual, x.dtype, *x.shape)


def _check_silu_mul(gate_up: Tensor) -> None:
    require_tensor("gate_up", gate_up, gate_up.dtype, gate_up.shape[0], gate_up.shape[1] // 2 * 2)


def _check_argmax_rows(logits: Tensor) -> None:
    require(logits.dim() == 2 and logits.shape[1] > 0, f"logits must be [n, vocab], are {list(logits.shape)}")


def _check_write_kv(
    k: Tensor,
    v: Tensor,
    pool: Tensor,
    layer: int,
    slot_mapping: Tensor,
    *,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    _pool(pool, layer)
    for name, x in (("k", k), ("v", v)):
        _dtypes(name, x, pool, k_scale, v_scale)
        require_tensor(name, x, k.dtype, k.shape[0], pool.shape[3], pool.shape[5])
    _slots(slot_mapping, pool, k.shape[0])


def _check_rotate_and_write(
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
) -> None:
    _pool(pool, layer)
    _dtypes("qkv", qkv, pool, k_scale, v_scale)
    n = positions.shape[0]
    require((num_kv_heads, head_dim) == (pool.shape[3], pool.shape[5]), "heads differ from the pool's")
    require_tensor("qkv", qkv, qkv.dtype, n, (num_heads + 2 * num_kv_heads) * head_dim)
    require_tensor("positions", positions, torch.int64, n)
    for name, table in (("cos", cos), ("sin", sin)):
        require_tensor(name, table, torch.float32, *cos.shape)
    require(2 * cos.shape[1] <= head_dim, f"rotary tables of {cos.shape[1]} angles for heads of {head_dim}")
    inside = bool(((positions >= 0) & (positions < cos.shape[0])).all())
    require(inside, f"a position lies beyond the rotary tables of {cos.shape[0]}")
    for name, norm in (("q_norm", q_norm), ("k_norm", k_norm)):
        if norm is not None:
            require_tensor(name, norm, qkv.dtype, head_dim)
    _slots(slot_mapping, pool, n)


def _check_paged_decode_attention(
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
) -> None:
    _pool(pool, layer)
    _dtypes("q", q, pool, k_scale, v_scale)
    _heads(q, pool)
    batch, count = block_table.shape[0], 1 if q.dim() == 3 else q.shape[1]
    require(q.dim() in (3, 4) and 1 <= count <= 16, f"q of shape {list(q.shape)}")
    require(q.shape[0] == batch, f"{q.shape[0]} queries, {batch} tables")
    _queries(q, pool, block_table, context_lens, [count] * batch, window, q_positions, out, lse)


def _check_paged_prefill_attention(
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
) -> None:
    _pool(pool, layer)
    _dtypes("q", q, pool, k_scale, v_scale)
    _heads(q, pool)
    require_tensor("cu_seqlens_q", cu_seqlens_q, torch.int32, block_table.shape[0] + 1)
    starts, lengths = cu_seqlens_q.tolist(), context_lens.tolist()
    require(starts[0] == 0 and starts[-1] == q.shape[0], f"cu_seqlens_q {starts} for {q.shape[0]} queries")
    counts = [end - start for start, end in pairwise(starts)]
    for i, (new, length) in enumerate(zip(counts, lengths, strict=True)):
        known = q_positions is not None or new <= length
        require(new >= 0 and known, f"sequence {i} has {new} new tokens of {length}")
    _queries(q, pool, block_table, context_lens, counts, window, q_positions, out, lse)


def _check_merge_attention_states(outs: Tensor, lses: Tensor) -> None:
    require(
        outs.dim() == 4 and outs.is_contiguous(), f"outs must be four-dimensional, are {list(outs.shape)}"
    )
    require_tensor("lses", lses, torch.float32, *outs.shape[:3])


def checked(form: Form) -> Form:
    """The form, refusing with KernelMisuse what it must not be given."""
    name = form.__name__
    check: Callable[..., None] = globals().get(f"_check_{name}") or getattr(expert_checks, name)

    @functools.wraps(form)
    def call(*args: Any, **kwargs: Any) -> Any:
        check(*args, **kwargs)
        return form(*args, **kwargs)

    return cast(Form, call)
