"""A layer's attention: the tokens' KV on its way into the pool, and what they see of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from engine.config import ModelConfig
from engine.loading import Layer
from engine.parallel.link import Link
from engine.parallel.plan import Shard
from engine.rope import rope_tables
from engine.step_inputs import StepInputs
from kernels import paged_decode_attention, paged_prefill_attention, rotate_and_write


class Attention:
    """Of one rank's heads. Holds the rotary tables, and no state of any sequence."""

    def __init__(
        self,
        config: ModelConfig,
        shard: Shard,
        link: Link | None,
        *,
        dtype: torch.dtype,
        device: torch.device,
        max_len: int,
    ) -> None:
        self._config = config
        self._shard = shard
        self._link = link
        self._dtype = dtype
        self._scale = config.head_dim**-0.5
        cos, sin = rope_tables(config.rope, config.head_dim, max_len, dtype)
        self.cos, self.sin = cos.to(device), sin.to(device)

    def __call__(self, qkv: Tensor, inputs: StepInputs, pool: Tensor, i: int, layer: Layer) -> Tensor:
        """Write K and V of the tokens to ``pool``'s layer ``i``, and of those other shares compute.

        qkv: [num_tokens, (heads + 2 × kv_heads of the shard) × head_dim]. Returns [num_tokens, heads ×
        head_dim].
        """
        # Only pages in float8 have scales.
        scales: dict[str, Any] = {}
        if pool.dtype != self._dtype:
            scales = {"k_scale": layer.k_scale, "v_scale": layer.v_scale}
        num_heads, head_dim = len(self._shard.heads), self._config.head_dim
        if inputs.others:
            assert self._link is not None
            take = self._link.swap(qkv[:, num_heads * head_dim :], inputs.share_sizes)
        q = self._write(qkv, inputs.positions, inputs.slots, pool, i, layer, num_heads, scales)
        for other in inputs.others:
            self._write(take(other.share), other.positions, other.slots, pool, i, layer, 0, scales)
        attended = _attend(q, inputs, pool, i, scale=self._scale, window=layer.window, **scales)
        return attended.view(len(qkv), -1)

    def _write(
        self,
        qkv: Tensor,
        positions: Tensor,
        slots: Tensor,
        pool: Tensor,
        i: int,
        layer: Layer,
        num_heads: int,
        scales: dict[str, Any],
    ) -> Tensor:
        return rotate_and_write(
            qkv,
            positions,
            self.cos,
            self.sin,
            pool,
            i,
            slots,
            num_heads=num_heads,
            num_kv_heads=len(self._shard.kv_heads),
            head_dim=self._config.head_dim,
            q_norm=layer.q_norm if num_heads else None,
            k_norm=layer.k_norm,
            eps=self._config.rms_norm_eps,
            **scales,
        )


def _attend(q: Tensor, inputs: StepInputs, pool: Tensor, layer: int, **rules: Any) -> Tensor:
    """q: [num_tokens, num_heads, head_dim]; returns the same shape."""
    n = inputs.num_decodes
    if inputs.chunk_table is None:
        return paged_decode_attention(q, pool, layer, inputs.decode_table, inputs.decode_lens, **rules)
    assert inputs.chunk_starts is not None
    assert inputs.chunk_lens is not None
    out = torch.empty_like(q)
    if n:
        paged_decode_attention(
            q[:n],
            pool,
            layer,
            inputs.decode_table,
            inputs.decode_lens,
            out=out[:n],
            **rules,
        )
    paged_prefill_attention(
        q[n:],
        pool,
        layer,
        inputs.chunk_table,
        inputs.chunk_starts,
        inputs.chunk_lens,
        out=out[n:],
        **rules,
    )
    return out
