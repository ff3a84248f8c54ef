"""Triton form of moving whole blocks between the pool and staging memory, or within the pool."""

# Triton has no types to check, and its code has compile-time constants in capitals.
# mypy: disable-error-code="import-untyped,untyped-decorator,no-untyped-def"
# ruff: noqa: N803

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

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
