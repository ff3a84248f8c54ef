"""Triton form of moving whole blocks between the pool and staging memory, or within the pool."""

# Triton has no types to check, and its code has compile-time constants in capitals.
# mypy: disable-error-code="import-untyped,untyped-decorator,no-untyped-def"
# ruff: noqa: N803

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moonpool.kernels import reference
from moonpool.kernels.reference import FP8, bits
from moonpool.kernels.triton.fp8 import as_bytes, fp8_mode, narrowed, widened
from moonpool.kernels.triton.launch import architecture, padded

WIDTH = 2048  # 64-bit words a program moves


@triton.jit
def move_block(
    source,
    target,
    source_ids,
    target_ids,
    sums,
    words,
    FROM: tl.constexpr,
    TO: tl.constexpr,
    SUM: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Grid: (n, tiles of WIDTH words). Block FROM ? source_ids[i] : i goes to block TO ? target_ids[i] : i.

    source, target: blocks of ``words`` 64-bit words each. Offsets are 64-bit: pools outgrow 32. With SUM the
    checksum of block i is added to sums[i], in whatever order programs come.
    """
    i = tl.program_id(0).to(tl.int64)
    here, there = i, i
    if FROM:
        here = tl.load(source_ids + i).to(tl.int64)
    if TO:
        there = tl.load(target_ids + i).to(tl.int64)
    word = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    exists = word < words
    value = tl.load(source + here * words + word, mask=exists, other=0)
    tl.store(target + there * words + word, value, mask=exists)
    if SUM:
        # The constants of reference.block_checksums.
        mixed = value.to(tl.uint64) ^ ((word + 1).to(tl.uint64) * 0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> 33)) * 0xFF51AFD7ED558CCD
        mixed = (mixed ^ (mixed >> 33)) * 0xC4CEB9FE1A85EC53
        mixed = mixed ^ (mixed >> 33)
        tl.atomic_add(sums + i, tl.sum(tl.where(exists, mixed, 0).to(tl.int64), 0))


def _words(blocks: Tensor) -> Tensor:
    """Contiguous blocks as 64-bit words: [n, words]."""
    return bits(blocks).flatten(1).view(torch.int64)


def _move(
    source: Tensor,
    target: Tensor,
    source_ids: Tensor | None,
    target_ids: Tensor | None,
    n: int,
    checksums: Tensor | None = None,
) -> None:
    words = source.shape[1]
    if checksums is not None:
        checksums.zero_()
    if n:
        move_block[(n, triton.cdiv(words, WIDTH))](
            source,
            target,
            source if source_ids is None else source_ids,
            target if target_ids is None else target_ids,
            source if checksums is None else checksums,
            words,
            FROM=source_ids is not None,
            TO=target_ids is not None,
            SUM=checksums is not None,
            WIDTH=WIDTH,
            num_warps=4,
        )


def gather_blocks(
    pool: Tensor, block_ids: Tensor, *, out: Tensor | None = None, checksums: Tensor | None = None
) -> Tensor:
    """As ``reference.gather_blocks``."""
    if pool[:1].nbytes % 8:
        return reference.gather_blocks(pool, block_ids, out=out, checksums=checksums)
    out = pool.new_empty((block_ids.shape[0], *pool.shape[1:])) if out is None else out
    _move(_words(pool), _words(out), block_ids, None, block_ids.shape[0], checksums)
    return out


def scatter_blocks(
    blocks: Tensor, pool: Tensor, block_ids: Tensor, *, checksums: Tensor | None = None
) -> None:
    """As ``reference.scatter_blocks``."""
    if pool[:1].nbytes % 8:
        reference.scatter_blocks(blocks, pool, block_ids, checksums=checksums)
    else:
        _move(_words(blocks), _words(pool), None, block_ids, block_ids.shape[0], checksums)


def copy_blocks(pool: Tensor, source_ids: Tensor, target_ids: Tensor) -> None:
    """As ``reference.copy_blocks``."""
    if pool[:1].nbytes % 8:
        reference.copy_blocks(pool, source_ids, target_ids)
    else:
        words = _words(pool)
        _move(words, words, source_ids, target_ids, source_ids.shape[0])


@triton.jit
def reshard_token(
    source,
    target,
    source_block,
    source_layer,
    source_kv,
    source_head,
    source_slot,
    target_block,
    target_layer,
    target_kv,
    target_head,
    target_slot,
    heads,
    dim,
    k_factor,
    v_factor,
    SOURCE_SIZE: tl.constexpr,
    TARGET_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    SOURCE_FP8: tl.constexpr,
    TARGET_FP8: tl.constexpr,
):
    """Grid: (tokens, layers, 2). The heads of one token of K or V, from one layout to the other.

    ``*_block`` … ``*_slot``: strides in elements, 64-bit where they are multiplied. What is copied is
    multiplied by k_factor or v_factor where either side is float8, but for a copy of bytes (neither flag).
    """
    token, layer, kv = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.program_id(2)
    head, column = tl.arange(0, HEADS).to(tl.int64)[:, None], tl.arange(0, DIM)[None, :]
    there = (head < heads) & (column < dim)
    here = token // SOURCE_SIZE * source_block + layer * source_layer + kv * source_kv
    here += token % SOURCE_SIZE * source_slot
    value = tl.load(source + here + head * source_head + column, mask=there)
    where = token // TARGET_SIZE * target_block + layer * target_layer + kv * target_kv
    where += token % TARGET_SIZE * target_slot
    to = target + where + head * target_head + column
    if SOURCE_FP8 == 0 and TARGET_FP8 == 0:
        tl.store(to, value.to(target.dtype.element_ty), mask=there)
    else:
        factor = tl.where(kv == 0, k_factor, v_factor)
        number = widened(value, tl.float32, SOURCE_FP8).to(tl.float32)
        if TARGET_FP8 == 0:
            number *= factor
        tl.store(to, narrowed(number, factor, target.dtype.element_ty, TARGET_FP8), mask=there)


def reshard_blocks(
    source: Tensor,
    target: Tensor,
    *,
    num_tokens: int,
    source_head: int = 0,
    target_head: int = 0,
    num_heads: int,
    source_layer: int = 0,
    target_layer: int = 0,
    num_layers: int,
    k_scales: tuple[float, float] = (1.0, 1.0),
    v_scales: tuple[float, float] = (1.0, 1.0),
) -> None:
    """As ``reference.reshard_blocks``."""
    if num_tokens and num_layers:
        same = source.dtype == target.dtype and k_scales[0] == k_scales[1] and v_scales[0] == v_scales[1]
        dim = source.shape[5]
        reshard_token[(num_tokens, num_layers, 2)](
            as_bytes(source[:, source_layer:, :, source_head:]),
            as_bytes(target[:, target_layer:, :, target_head:]),
            *source.stride()[:5],
            *target.stride()[:5],
            num_heads,
            dim,
            k_scales[0] / k_scales[1],
            v_scales[0] / v_scales[1],
            SOURCE_SIZE=source.shape[4],
            TARGET_SIZE=target.shape[4],
            HEADS=padded(num_heads),
            DIM=padded(dim),
            SOURCE_FP8=0 if same else fp8_mode(source.dtype, architecture(source.device), not source.is_cuda),
            TARGET_FP8=0 if same else int(target.dtype == FP8),
            num_warps=1,
        )
