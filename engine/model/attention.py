"""A layer's attention: write the tokens' KV to the pool and attend over it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moonpool.engine.checkpoint.config import ModelConfig
from moonpool.engine.checkpoint.rope import RopeConfig, rope_tables
from moonpool.engine.collectives.link import Link
from moonpool.engine.memory.packing import Packing
from moonpool.engine.model.inputs import ContextPart, StepInputs
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
        self.scale = config.scale or config.head_dim**-0.5
        tables: dict[RopeConfig, tuple[Tensor, Tensor]] = {}
        for rope in dict.fromkeys(config.ropes):
            rotated = config.head_dim if config.latent is None else config.latent.rope_dim
            cos, sin = rope_tables(rope, rotated, max_len, dtype)
            tables[rope] = cos.to(device), sin.to(device)
        self.cos_sin = [tables[config.ropes[i]] for i in shard.layers]
        self._packing = Packing.of([config.windows[i] for i in shard.layers])
        self._pool: Tensor | None = None
        self._views: dict[int, Tensor] = {}  # of that pool, by full layer

    def __call__(self, qkv: Tensor, inputs: StepInputs, pool: Tensor, i: int, layer: Layer) -> Tensor:
        """Write K and V of the tokens to layer ``i`` of ``pool``, and attend. With context parallelism every
        cp rank does so for all tokens and its own blocks, and the results are merged.

        qkv: [num_tokens, (heads + 2 × kv_heads of the shard) × head_dim], of latents [num_tokens, (heads + 1)
        × head_dim]. Returns [num_tokens, heads × head_dim].
        """
        # Only float8 pages have the checkpoint's scales; int8 pages have their own.
        scales: dict[str, Any] = {}
        if pool.dtype == FP8:
            scales = {"k_scale": layer.k_scale, "v_scale": layer.v_scale}
        rules = {"scale": self.scale, "window": layer.window, "soft_cap": self._config.soft_cap, **scales}
        if self._config.latent is not None:
            rules["key_only"] = self._config.latent.rope_dim
        if self._config.qk_norm == "all":
            self._norm_all(qkv, layer)

        context = inputs.context
        if context is None:
            q = self._write(qkv, inputs, pool, i, layer, scales)
            tables = inputs.decode_table, inputs.chunk_table
            if inputs.decode_places is not None and not layer.window:
                pool, i, tables = self._view(pool, i), 0, (inputs.decode_places, inputs.chunk_places)
            return _attend(q, inputs, pool, i, tables, layer.sinks, **rules).view(len(qkv), -1)
        assert self.link is not None
        if context.counts:
            qkv = torch.cat(self.link.gather_cp(qkv, context.counts))
        q = self._write(qkv, context, pool, i, layer, scales)
        out, lse = self._merged(*_attend_own(q, context, pool, i, **rules), context.counts)
        return _with_sinks(out, lse, layer.sinks).view(len(out), -1)

    def move(self, pool: Tensor, moves: Tensor) -> None:
        """Move blocks into packs. moves: see ``StepInputs``."""
        assert self._packing is not None
        self._packing.move(pool, moves)

    def _view(self, pool: Tensor, i: int) -> Tensor:
        """Return full layer ``i`` of the pool by places."""
        if self._pool is not pool:
            assert self._packing is not None
            self._pool, self._views = pool, self._packing.views(pool)
        return self._views[i]

    def _write(
        self,
        qkv: Tensor,
        tokens: StepInputs | ContextPart,
        pool: Tensor,
        i: int,
        layer: Layer,
        scales: dict[str, Any],
    ) -> Tensor:
        """Write the rotated K, and V, of tokens with slots. Return rotated queries of all: [num_tokens, heads
        of the shard, head_dim]."""
        num_heads, head_dim = len(self._shard.heads), self._config.head_dim
        if self._config.latent is not None:
            heads = qkv.view(len(qkv), num_heads + 1, head_dim)
            return _write_latents(heads, *self.cos_sin[i], tokens, pool, i, **scales)
        norms_heads = self._config.qk_norm == "head"
        return rotate_and_write(
            qkv,
            tokens.positions,
            *self.cos_sin[i],
            pool,
            i,
            tokens.slots,
            num_heads=num_heads,
            num_kv_heads=len(self._shard.kv_heads),
            head_dim=head_dim,
            q_norm=layer.q_norm if norms_heads else None,
            k_norm=layer.k_norm if norms_heads else None,
            eps=self._config.rms_norm_eps,
            **scales,
        )

    def _merged(self, out: Tensor, lse: Tensor, counts: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Merge what each cp rank attended over its keys, for the tokens of this rank.

        out: [all tokens, num_heads, head_dim]; lse: float32 [all tokens, num_heads]. Returns both, of this
        rank's tokens: all of them without ``counts``.
        """
        assert self.link is not None
        width = out[0].numel()
        # In one exchange: the bytes of the float32 as more values of the result's dtype.
        both = torch.cat((out.flatten(1), lse.view(out.dtype)), 1)
        if counts:
            parts = self.link.scatter_cp(both, counts)
        else:
            parts = self.link.gather_cp(both, [len(both)] * self._shard.cp)
        outs = torch.stack([part[:, :width] for part in parts])
        lses = torch.stack([part[:, width:] for part in parts]).view(torch.float32)
        return merge_attention_states(outs.view(*lses.shape, -1), lses)

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
    tokens: StepInputs | ContextPart,
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
    q: Tensor,
    inputs: StepInputs,
    pool: Tensor,
    layer: int,
    tables: tuple[Tensor, Tensor | None],
    sinks: Tensor | None,
    **rules: Any,
) -> Tensor:
    """q: [num_tokens, num_heads, head_dim]; tables: of decodes and chunks. Returns the shape of q."""
    n, out = inputs.num_decodes, torch.empty_like(q)
    decode_table, chunk_table = tables
    lse = None if sinks is None else q.new_empty(q.shape[:2], dtype=torch.float32)
    if chunk_table is None:
        paged_decode_attention(q, pool, layer, decode_table, inputs.decode_lens, out=out, lse=lse, **rules)
        return _with_sinks(out, lse, sinks)
    assert inputs.chunk_starts is not None
    assert inputs.chunk_lens is not None
    if n:
        rules |= {"out": out[:n], "lse": None if lse is None else lse[:n]}
        paged_decode_attention(q[:n], pool, layer, decode_table, inputs.decode_lens, **rules)
    rules |= {"out": out[n:], "lse": None if lse is None else lse[n:], "max_q_len": inputs.max_chunk_tokens}
    paged_prefill_attention(q[n:], pool, layer, chunk_table, inputs.chunk_starts, inputs.chunk_lens, **rules)
    return _with_sinks(out, lse, sinks)


def _with_sinks(out: Tensor, lse: Tensor | None, sinks: Tensor | None) -> Tensor:
    """Scale, in place, attention by a softmax without sinks to one with exp(sink) added to its sum, exp(lse).

    out: [n, num_heads, head_dim]; lse: float32 [n, num_heads]; sinks: float32 [num_heads], None: none.
    """
    return out if lse is None or sinks is None else out.mul_(torch.sigmoid(lse - sinks)[..., None])


def _attend_own(
    q: Tensor, context: ContextPart, pool: Tensor, layer: int, **rules: Any
) -> tuple[Tensor, Tensor]:
    """Attend over the keys in this cp rank's blocks. q: [all tokens, num_heads, head_dim]; returns the same
    shape, and float32 [all tokens, num_heads], -inf where a query sees no key."""
    out, lse, first = torch.empty_like(q), q.new_empty(q.shape[:2], dtype=torch.float32), 0
    for keys in context.keys_of(rules["window"]):
        rows = slice(first, first := first + keys.num_queries)
        rules |= {"q_positions": keys.first, "out": out[rows], "lse": lse[rows]}
        if keys.starts is None:
            paged_decode_attention(q[rows], pool, layer, keys.table, keys.lens, **rules)
        else:
            paged_prefill_attention(q[rows], pool, layer, keys.table, keys.starts, keys.lens, **rules)
    return out, lse
