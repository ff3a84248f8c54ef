"""A layer's attention: write the tokens' KV to the pool and attend over it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from moonpool.engine.checkpoint.config import ModelConfig
from moonpool.engine.checkpoint.rope import RopeConfig, rope_tables
from moonpool.engine.collectives.link import Link
from moonpool.engine.model.inputs import ChunkKeys, RemoteTokens, StepInputs
from moonpool.engine.model.weight_loader import Layer
from moonpool.engine.sharding.parallel_plan import Shard
from moonpool.kernels.dispatch import (
    merge_attention_states,
    paged_decode_attention,
    paged_prefill_attention,
    rotate_and_write,
    write_kv,
)
from moonpool.kernels.reference.dtypes import FP8
from moonpool.kernels.reference.kv import rotate


class Attention:
    """Attention of one rank's heads. Has the rotary tables and no per-sequence state."""

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
        self.link = link
        self.max_len = max_len
        self._scale = config.scale or config.head_dim**-0.5
        tables: dict[RopeConfig, tuple[Tensor, Tensor]] = {}
        for rope in dict.fromkeys(config.ropes):
            rotated = config.head_dim if config.latent is None else config.latent.rope_dim
            cos, sin = rope_tables(rope, rotated, max_len, dtype)
            tables[rope] = cos.to(device), sin.to(device)
        self._cos_sin = [tables[config.ropes[i]] for i in shard.layers]

    def __call__(self, qkv: Tensor, inputs: StepInputs, pool: Tensor, i: int, layer: Layer) -> Tensor:
        """Write K and V of all cp ranks' tokens to layer ``i`` of ``pool``, and attend.

        qkv: [num_tokens, (heads + 2 × kv_heads of the shard) × head_dim], of latents [num_tokens, (heads + 1)
        × head_dim]. Returns [num_tokens, heads × head_dim].
        """
        # Only float8 pages have the checkpoint's scales; int8 pages have their own.
        scales: dict[str, Any] = {}
        if pool.dtype == FP8:
            scales = {"k_scale": layer.k_scale, "v_scale": layer.v_scale}
        rules = {"scale": self._scale, "window": layer.window, "soft_cap": self._config.soft_cap, **scales}
        if self._config.latent is not None:
            rules["key_only"] = self._config.latent.rope_dim
        num_heads, head_dim = len(self._shard.heads), self._config.head_dim
        norms_heads = self._config.qk_norm == "head"
        if self._config.qk_norm == "all":
            self._norm_all(qkv, layer)

        def write(qkv: Tensor, tokens: StepInputs | RemoteTokens, num_heads: int) -> Tensor:
            if self._config.latent is not None:
                heads = qkv.view(len(qkv), num_heads + 1, head_dim)
                return _write_latents(heads, *self._cos_sin[i], tokens, pool, i, **scales)
            return rotate_and_write(
                qkv,
                tokens.positions,
                *self._cos_sin[i],
                pool,
                i,
                tokens.slots,
                num_heads=num_heads,
                num_kv_heads=len(self._shard.kv_heads),
                head_dim=head_dim,
                q_norm=layer.q_norm if num_heads and norms_heads else None,
                k_norm=layer.k_norm if norms_heads else None,
                eps=self._config.rms_norm_eps,
                **scales,
            )

        if not inputs.others:
            q = write(qkv, inputs, num_heads)
            return _attend(q, inputs, pool, i, layer.sinks, **rules).view(len(qkv), -1)
        assert self.link is not None
        take = self.link.exchange_cp(qkv[:, num_heads * head_dim :], inputs.cp_token_counts)
        q = write(qkv, inputs, num_heads)

        def receive(other: RemoteTokens) -> None:
            write(take(other.cp_rank), other, 0)

        if layer.window or layer.sinks is not None:
            # A window is defined by positions in the whole block table, a sink by the whole softmax.
            for other in inputs.others:
                receive(other)
            attended = _attend(q, inputs, pool, i, layer.sinks, **rules)
        else:
            attended = _attend_in_parts(q, inputs, receive, pool, i, **rules)
        return attended.view(len(qkv), -1)

    def _norm_all(self, qkv: Tensor, layer: Layer) -> None:
        """Norm q over all heads of all tp ranks, and k, in place."""
        assert layer.q_norm is not None
        assert layer.k_norm is not None
        config, shard = self._config, self._shard
        parts = torch.split(qkv, [len(layer.q_norm), len(layer.k_norm), len(layer.k_norm)], dim=1)[:2]
        squares = torch.stack([part.float().square().sum(-1) for part in parts], dim=1)
        if shard.tp > 1 and self.link is not None:
            # Ranks that have the same KV head count it once together.
            squares[:, 1] *= config.num_kv_heads / (len(shard.kv_heads) * shard.tp)
            squares = self.link.all_reduce(squares)
        sizes = (config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim)
        for part, weight, square, size in zip(
            parts, (layer.q_norm, layer.k_norm), squares.unbind(1), sizes, strict=True
        ):
            scale = torch.rsqrt(square / size + config.rms_norm_eps)
            part.copy_(part.float() * scale[:, None] * weight.float())


def _write_latents(
    heads: Tensor,
    cos: Tensor,
    sin: Tensor,
    tokens: StepInputs | RemoteTokens,
    pool: Tensor,
    layer: int,
    *,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> Tensor:
    """Rotate the queries and the latent of each token, and write the latent. Return the queries.

    heads: [n, num_heads + 1, head_dim], the latent last; pool: K and V are the same memory, so that they have
    one scale.
    """
    positions = tokens.positions
    rotated = rotate(heads.float(), cos[positions], sin[positions]).to(heads.dtype)
    latent = rotated[:, -1:].contiguous()
    write_kv(latent, latent, pool, layer, tokens.slots, k_scale=k_scale, v_scale=v_scale)
    return rotated[:, :-1].contiguous()


def _attend(
    q: Tensor, inputs: StepInputs, pool: Tensor, layer: int, sinks: Tensor | None, **rules: Any
) -> Tensor:
    """q: [num_tokens, num_heads, head_dim]; returns the same shape."""
    n, out = inputs.num_decodes, torch.empty_like(q)
    lse = None if sinks is None else q.new_empty(q.shape[:2], dtype=torch.float32)
    if inputs.chunk_table is None:
        paged_decode_attention(
            q, pool, layer, inputs.decode_table, inputs.decode_lens, out=out, lse=lse, **rules
        )
        return _with_sinks(out, lse, sinks)
    assert inputs.chunk_starts is not None
    assert inputs.chunk_lens is not None
    if n:
        rules |= {"out": out[:n], "lse": None if lse is None else lse[:n]}
        paged_decode_attention(q[:n], pool, layer, inputs.decode_table, inputs.decode_lens, **rules)
    rules |= {"out": out[n:], "lse": None if lse is None else lse[n:], "max_q_len": inputs.max_chunk_tokens}
    paged_prefill_attention(
        q[n:], pool, layer, inputs.chunk_table, inputs.chunk_starts, inputs.chunk_lens, **rules
    )
    return _with_sinks(out, lse, sinks)


def _with_sinks(out: Tensor, lse: Tensor | None, sinks: Tensor | None) -> Tensor:
    """Scale, in place, attention by a softmax without sinks to one with exp(sink) added to its sum, exp(lse).

    out: [n, num_heads, head_dim]; lse: float32 [n, num_heads]; sinks: float32 [num_heads], None: none.
    """
    return out if lse is None or sinks is None else out.mul_(torch.sigmoid(lse - sinks)[..., None])


def _attend_in_parts(
    q: Tensor, inputs: StepInputs, receive: Callable[[RemoteTokens], None], pool: Tensor, i: int, **rules: Any
) -> Tensor:
    """As ``_attend``, overlapped with the exchange: first over own keys, then over those of each other cp
    rank, merged by their log-sum-exp."""
    n = inputs.num_decodes
    decoded = q[:0]
    if n:
        decoded = paged_decode_attention(q[:n], pool, i, inputs.decode_table, inputs.decode_lens, **rules)
    num_parts = sum(keys is not None for keys in (inputs.own_keys, *(other.keys for other in inputs.others)))
    outs = q.new_empty((num_parts, len(q) - n, *q.shape[1:]))
    lses = q.new_empty(outs.shape[:-1], dtype=torch.float32)
    free = iter(zip(outs, lses, strict=True))

    def attend(keys: ChunkKeys | None) -> None:
        if keys is None:
            return
        assert inputs.chunk_starts is not None
        out, lse = next(free)
        paged_prefill_attention(
            q[n:],
            pool,
            i,
            keys.table,
            inputs.chunk_starts,
            keys.lens,
            q_positions=keys.first,
            out=out,
            lse=lse,
            **rules,
        )

    attend(inputs.own_keys)
    for other in inputs.others:
        receive(other)
        attend(other.keys)
    if num_parts == 0:
        return decoded
    merged = outs[0] if num_parts == 1 else merge_attention_states(outs, lses)[0]
    return torch.cat((decoded, merged)) if n else merged
