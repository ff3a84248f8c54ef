"""Whole blocks: between the pool and elsewhere, and between layouts."""

from __future__ import annotations

import torch
from torch import Tensor


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
    """Copy a run of tokens between blocks of different layouts: the part that two ranks' shards share.

    source: [n, source_layers, 2, source_heads, source_block_size, head_dim]; target: [m, target_layers, 2,
    target_heads, target_block_size, head_dim]; both any strides with a contiguous head_dim, and any dtypes.
    Token t of the run is slot t % block_size of block t // block_size on either side. ``num_layers`` layers
    from ``source_layer`` on go to those from ``target_layer`` on, and so do heads; what else is in
    ``target`` stays. A pipeline stage is a range of layers, a tensor-parallel shard one of heads; where
    ranks replicate a head, each target takes it from any of them.
    """
    heads = slice(source_head, source_head + num_heads), slice(target_head, target_head + num_heads)
    layers = slice(source_layer, source_layer + num_layers), slice(target_layer, target_layer + num_layers)
    size, target_size = source.shape[4], target.shape[4]
    taken = source[: -(-num_tokens // size), layers[0], :, heads[0]]
    # [layers, 2, heads, tokens, head_dim]
    tokens = taken.permute(1, 2, 3, 0, 4, 5).flatten(3, 4)[..., :num_tokens, :]
    token = torch.arange(num_tokens, device=target.device)
    part = target[:, layers[1], :, heads[1]]
    part[token // target_size, :, :, :, token % target_size] = tokens.permute(3, 0, 1, 2, 4).to(target.dtype)
