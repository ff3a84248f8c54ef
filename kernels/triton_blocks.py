"""Triton form of moving whole blocks between the pool and staging memory, or within the pool."""

# Triton has no types to check, and its code has compile-time constants in capitals.
# mypy: disable-error-code="import-untyped,untyped-decorator,no-untyped-def"
# ruff: noqa: N803

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton_decode import padded

WIDTH = 2048  # words a program moves


@triton.jit
def move_block(
    source, target, source_ids, target_ids, words, FROM: tl.constexpr, TO: tl.constexpr, WIDTH: tl.constexpr
):
    """Grid: (n, tiles of WIDTH words). Block FROM ? source_ids[i] : i goes to block TO ? target_ids[i] : i.

    source, target: blocks of ``words`` 32-bit words each. Offsets are 64-bit: pools outgrow 32.
    """
    i = tl.program_id(0).to(tl.int64)
    here, there = i, i
    if FROM:
        here = tl.load(source_ids + i).to(tl.int64)
    if TO:
        there = tl.load(target_ids + i).to(tl.int64)
    word = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    exists = word < words
    value = tl.load(source + here * words + word, mask=exists)
    tl.store(target + there * words + word, value, mask=exists)


def _words(blocks: Tensor) -> Tensor:
    """Contiguous blocks as 32-bit words: [n, words]."""
    return blocks.view(blocks.shape[0], -1).view(torch.int32)


def _move(
    source: Tensor, target: Tensor, source_ids: Tensor | None, target_ids: Tensor | None, n: int
) -> None:
    words = source.shape[1]
    if n:
        move_block[(n, triton.cdiv(words, WIDTH))](
            source,
            target,
            source if source_ids is None else source_ids,
            target if target_ids is None else target_ids,
            words,
            FROM=source_ids is not None,
            TO=target_ids is not None,
            WIDTH=WIDTH,
            num_warps=4,
        )


def gather_blocks(pool: Tensor, block_ids: Tensor, *, out: Tensor | None = None) -> Tensor:
    """As ``reference.gather_blocks``."""
    out = pool.new_empty((block_ids.shape[0], *pool.shape[1:])) if out is None else out
    _move(_words(pool), _words(out), block_ids, None, block_ids.shape[0])
    return out


def scatter_blocks(blocks: Tensor, pool: Tensor, block_ids: Tensor) -> None:
    """As ``reference.scatter_blocks``."""
    _move(_words(blocks), _words(pool), None, block_ids, block_ids.shape[0])


def copy_blocks(pool: Tensor, source_ids: Tensor, target_ids: Tensor) -> None:
    """As ``reference.copy_blocks``."""
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
    SOURCE_SIZE: tl.constexpr,
    TARGET_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
):
    """Grid: (tokens, layers, 2). The heads of one token of K or V, from one layout to the other.

    ``*_block`` … ``*_slot``: strides in elements, 64-bit where they are multiplied.
    """
    token, layer, kv = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.program_id(2)
    head, column = tl.arange(0, HEADS).to(tl.int64)[:, None], tl.arange(0, DIM)[None, :]
    there = (head < heads) & (column < dim)
    here = token // SOURCE_SIZE * source_block + layer * source_layer + kv * source_kv
    here += token % SOURCE_SIZE * source_slot
    value = tl.load(source + here + head * source_head + column, mask=there)
    where = token // TARGET_SIZE * target_block + layer * target_layer + kv * target_kv
    where += token % TARGET_SIZE * target_slot
    tl.store(target + where + head * target_head + column, value.to(target.dtype.element_ty), mask=there)


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
) -> None:
    """As ``reference.reshard_blocks``."""
    if num_tokens and num_layers:
        dim = source.shape[5]
        reshard_token[(num_tokens, num_layers, 2)](
            source[:, source_layer:, :, source_head:],
            target[:, target_layer:, :, target_head:],
            *source.stride()[:5],
            *target.stride()[:5],
            num_heads,
            dim,
            SOURCE_SIZE=source.shape[4],
            TARGET_SIZE=target.shape[4],
            HEADS=padded(num_heads),
            DIM=padded(dim),
            num_warps=1,
        )
