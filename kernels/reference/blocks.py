"""Whole blocks: between the pool and elsewhere, and between layouts."""

from __future__ import annotations

import torch
from torch import Tensor

from moonpool.kernels.reference.pool_dtype import to_pool_dtype
from moonpool.kernels.reference.precision import wide


def _logical_shift(x: Tensor, bits: int) -> Tensor:
    """x >> bits as if x: int64 had no sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def block_checksums(blocks: Tensor) -> Tensor:
    """One int64 of each block's bytes: blocks, contiguous, [n, …], a multiple of 8 bytes each.

    The sum, modulo 2^64, over a block's 64-bit words, of a mix of the word and its place: any order of
    summing gives the same, every change of one word changes it, and of other changes all but one in 2^64 do.
    Not against forgery.
    """
    words = blocks.flatten(1).view(torch.int64)
    place = torch.arange(1, words.shape[1] + 1, dtype=torch.int64, device=blocks.device)
    mixed = words ^ (place * -7046029254386353131)
    mixed = (mixed ^ _logical_shift(mixed, 33)) * -49064778989728563
    mixed = (mixed ^ _logical_shift(mixed, 33)) * -4265267296055464877
    return (mixed ^ _logical_shift(mixed, 33)).sum(1)


def gather_blocks(
    pool: Tensor, block_ids: Tensor, *, out: Tensor | None = None, checksums: Tensor | None = None
) -> Tensor:
    """Copies of blocks, one after the other: [n, *pool.shape[1:]]. block_ids: int64 [n]; pool: contiguous.

    checksums: int64 [n], is filled with ``block_checksums`` of them, read in the same pass.
    """
    out = pool.new_empty((block_ids.shape[0], *pool.shape[1:])) if out is None else out
    torch.index_select(bits(pool), 0, block_ids, out=bits(out))
    if checksums is not None:
        checksums.copy_(block_checksums(out))
    return out


def scatter_blocks(
    blocks: Tensor, pool: Tensor, block_ids: Tensor, *, checksums: Tensor | None = None
) -> None:
    """The reverse: block i of ``blocks`` goes to block_ids[i]. No block may be named twice.

    checksums: int64 [n], is filled with those of what was written, for the caller to compare.
    """
    bits(pool).index_copy_(0, block_ids, bits(blocks))
    if checksums is not None:
        checksums.copy_(block_checksums(blocks))


def copy_blocks(pool: Tensor, source_ids: Tensor, target_ids: Tensor) -> None:
    """Block source_ids[i] goes to target_ids[i]; no target may be named twice, or be a source of this
    call."""
    whole = bits(pool)
    whole.index_copy_(0, target_ids, whole.index_select(0, source_ids))


def bits(blocks: Tensor) -> Tensor:
    """The same memory in a dtype that torch copies in every way: it has no index_copy of float8."""
    return blocks.view(torch.uint8) if blocks.dtype.itemsize == 1 else blocks


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
    """Copy a run of tokens between blocks of different layouts: the part that two ranks' shards share.

    source: [n, source_layers, 2, source_heads, source_block_size, head_dim]; target: [m, target_layers, 2,
    target_heads, target_block_size, head_dim]; both any strides with a contiguous head_dim, and any dtypes.
    Token t of the run is slot t % block_size of block t // block_size on either side. ``num_layers`` layers
    from ``source_layer`` on go to those from ``target_layer`` on, and so do heads; what else is in
    ``target`` stays. A pipeline stage is a range of layers, a tensor-parallel shard one of heads; where
    ranks replicate a head, each target takes it from any of them. k_scales, v_scales: those of source and
    target where one is float8_e4m3fn (1 for a side that is not): what is copied is value * source / target.
    """
    heads = slice(source_head, source_head + num_heads), slice(target_head, target_head + num_heads)
    layers = slice(source_layer, source_layer + num_layers), slice(target_layer, target_layer + num_layers)
    size, target_size = source.shape[4], target.shape[4]
    taken = source[: -(-num_tokens // size), layers[0], :, heads[0]]
    # [layers, 2, heads, tokens, head_dim]
    tokens = taken.permute(1, 2, 3, 0, 4, 5).flatten(3, 4)[..., :num_tokens, :]
    token = torch.arange(num_tokens, device=target.device)
    part = target[:, layers[1], :, heads[1]]
    moved = tokens.permute(3, 0, 1, 2, 4)  # [tokens, layers, 2, heads, head_dim]
    for kv, (of_source, of_target) in enumerate((k_scales, v_scales)):
        values = moved[:, :, kv]
        if source.dtype != target.dtype or of_source != of_target:
            values = to_pool_dtype(wide(values) * of_source, of_target, target.dtype)
        part[token // target_size, :, kv, :, token % target_size] = values
