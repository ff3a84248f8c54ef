"""Llama, Mistral, Mixtral, Qwen2 and Qwen3, dense and of experts: one decoder, whose differences are in its
configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.config import ModelConfig
from engine.expert_load import new_table
from engine.loading import Loader
from engine.parallel.link import Link
from engine.parallel.plan import ParallelPlan, Shard
from engine.rope import rope_tables
from engine.weights import Checkpoint
from kernels import (
    paged_decode_attention,
    paged_prefill_attention,
    rms_norm,
    rotate_and_write,
)


@dataclass(slots=True)
class StepInputs:
    """The tensors of one step: the tokens of num_decodes sequences, then those of the prompt chunks."""

    token_ids: Tensor  # int64 [num_tokens]
    positions: Tensor  # int64 [num_tokens]
    slots: Tensor  # int64 [num_tokens]: block * block_size + offset
    num_decodes: int
    decode_table: Tensor  # int32 [num_decodes, max_blocks], padded with -1
    decode_lens: Tensor  # int32 [num_decodes], the new token included
    chunk_table: Tensor | None = None  # int32 [num_chunks, max_blocks]
    chunk_starts: Tensor | None = None  # int32 [num_chunks + 1], cumulative new tokens
    chunk_lens: Tensor | None = None  # int32 [num_chunks], cached and new tokens

    def to(self, device: torch.device) -> StepInputs:
        """Themselves where they are there."""
        if self.token_ids.device == device:
            return self

        def moved(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.to(device)

        return StepInputs(
            self.token_ids.to(device),
            self.positions.to(device),
            self.slots.to(device),
            self.num_decodes,
            self.decode_table.to(device),
            self.decode_lens.to(device),
            moved(self.chunk_table),
            moved(self.chunk_starts),
            moved(self.chunk_lens),
        )


class Model:
    """One rank's weights and forward pass. Holds no state of any sequence: that is all in the pool."""

    def __init__(
        self,
        config: ModelConfig,
        checkpoint: Checkpoint,
        *,
        dtype: torch.dtype,
        device: torch.device,
        max_len: int,
        shard: Shard | None = None,
        link: Link | None = None,
        expert_load: Tensor | None = None,
    ) -> None:
        """Load the shard's part of the checkpoint (None: all of it), computing in ``dtype``. ``link``: to the
        other ranks, where there are any. ``expert_load``: the table this rank counts experts' rows in (see
        ``ExpertLoad``); None: one of its own.

        Raises CheckpointError before anything is loaded.
        """
        self.shard = shard = shard or ParallelPlan().shard(config, 0)
        self.link = link
        self.expert_load = new_table(config, device) if expert_load is None else expert_load
        loader = Loader(config, checkpoint, dtype, device, shard, self.expert_load)
        self.config = config
        self.dtype = dtype
        self.scale = config.head_dim**-0.5
        self.layers = [loader.layer(i) for i in shard.layers]
        if shard.is_first:
            self.embedding = loader.embedding()
        if shard.is_last:
            self.head = loader.head()
            self.norm = loader.tensor("model.norm.weight")
        cos, sin = rope_tables(config.rope, config.head_dim, max_len, dtype)
        self.cos, self.sin = cos.to(device), sin.to(device)

    def forward(self, inputs: StepInputs, pool: Tensor, hidden: Tensor | None = None) -> Tensor:
        """Through the shard's layers, writing the tokens' KV to ``pool``: [num_tokens, hidden].

        ``hidden``: what the stage before returned, None for the first. The last stage's is normed.
        """
        config, shard = self.config, self.shard
        eps, scale, head_dim = config.rms_norm_eps, self.scale, config.head_dim
        hidden = self.embed(inputs.token_ids) if hidden is None else hidden
        num_tokens = hidden.shape[0]
        quantized = pool.dtype != self.dtype
        residual = hidden
        for i, layer in enumerate(self.layers):
            if i == 0:
                x = rms_norm(hidden, layer.input_norm, eps)
            else:
                x, residual = rms_norm(hidden, layer.input_norm, eps, residual=residual)
            # Only pages in float8 have scales.
            scales: dict[str, Any] = {"k_scale": layer.k_scale, "v_scale": layer.v_scale} if quantized else {}
            q = rotate_and_write(
                layer.qkv(x),
                inputs.positions,
                self.cos,
                self.sin,
                pool,
                i,
                inputs.slots,
                num_heads=len(shard.heads),
                num_kv_heads=len(shard.kv_heads),
                head_dim=head_dim,
                q_norm=layer.q_norm,
                k_norm=layer.k_norm,
                eps=eps,
                **scales,
            )
            attended = self._attend(q, inputs, pool, i, scale=scale, window=layer.window, **scales)
            hidden = self._sum(layer.o(attended.view(num_tokens, -1)))
            x, residual = rms_norm(hidden, layer.post_norm, eps, residual=residual)
            hidden = self._sum(layer.mlp(x))
        if not shard.is_last:
            return hidden + residual
        normed, _ = rms_norm(hidden, self.norm, eps, residual=residual)
        return normed

    def embed(self, token_ids: Tensor) -> Tensor:
        """token_ids: int64 [n]. Returns [n, hidden]: every rank of the stage looks up its own words."""
        words = self.shard.vocab
        if self.shard.tp == 1:
            return F.embedding(token_ids, self.embedding).to(self.dtype)
        row = token_ids - words.start
        elsewhere = (row < 0) | (row >= len(words))
        hidden = F.embedding(row.masked_fill_(elsewhere, 0), self.embedding).to(self.dtype)
        return self._sum(hidden.masked_fill_(elsewhere[:, None], 0))

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden: [n, hidden]. Returns [n, words of the shard] in the dtype computed in."""
        return self.head(hidden)

    def _sum(self, part: Tensor) -> Tensor:
        """The sum over the ranks of the stage, in ``part``'s place or elsewhere."""
        return part if self.shard.tp == 1 or self.link is None else self.link.all_reduce(part)

    @staticmethod
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
