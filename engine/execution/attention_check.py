"""Attention as compiled for this GPU against its definition, before an engine serves.

A compiler may make wrong code of a right kernel for some shapes only (docs/decisions/gpu.md).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moonpool.engine.checkpoint.config import ModelConfig
from moonpool.engine.errors import WrongKernel
from moonpool.engine.sharding.parallel_plan import Shard
from moonpool.kernels import reference
from moonpool.kernels.dispatch import paged_decode_attention, paged_prefill_attention, write_kv

_NUM_TOKENS = 150
# Of the largest value. Rounding to 16 bits is off by a thousandth, what is computed wrongly by about 1.
_MOST_OFF = 0.05


@torch.inference_mode()
def check_attention(
    config: ModelConfig, shard: Shard, pool: Tensor, dtype: torch.dtype, scale: float
) -> None:
    """Attend over random tokens, which replace the pool's first blocks, with each window of the model.

    pool: [num_blocks, layers of the shard, 2 (of latents 1), kv_heads, block_size, head_dim]; dtype: of
    queries. Raises WrongKernel.
    """
    num_tokens = min(_NUM_TOKENS, len(pool) * pool.shape[4])
    generator = torch.Generator().manual_seed(0)
    key_only = 0
    if config.latent is not None:
        key_only, pool = config.latent.rope_dim, pool.expand(-1, -1, 2, -1, -1, -1)

    def drawn(num: int, num_heads: int) -> Tensor:
        values = torch.randn(num, num_heads, config.head_dim, generator=generator)
        return values.to(pool.device, dtype)

    def numbers(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=pool.device)

    k = drawn(num_tokens, pool.shape[3])
    v = k if config.latent is not None else drawn(num_tokens, pool.shape[3])
    write_kv(k, v, pool, 0, torch.arange(num_tokens, device=pool.device))
    q = drawn(-(-num_tokens // 4), len(shard.heads))
    table = numbers(*range(-(-num_tokens // pool.shape[4])))[None]
    lens, starts = numbers(num_tokens), numbers(0, len(q))
    for window in sorted({config.windows[i] for i in shard.layers}):
        rules: dict[str, Any] = {"scale": scale, "window": window, "soft_cap": config.soft_cap}
        rules |= {"key_only": key_only} if key_only else {}
        for what, form, definition, given in (
            ("prefill", paged_prefill_attention, reference.paged_prefill_attention, (q, starts, lens)),
            ("decode", paged_decode_attention, reference.paged_decode_attention, (q[-1:], lens)),
        ):
            queries, *rest = given
            lse = queries.new_empty(queries.shape[:2], dtype=torch.float32) if config.sinks else None
            found = form(queries, pool, 0, table, *rest, lse=lse, **rules)[..., key_only:].float()
            meant = definition(queries, pool, 0, table, *rest, **rules)[..., key_only:].float()
            off = ((found - meant).abs().max() / meant.abs().max()).item()
            if not off <= _MOST_OFF:  # NaN is not
                raise WrongKernel(what, config.head_dim, str(pool.dtype), str(pool.device), off)
