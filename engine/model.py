"""Llama, Mistral, Mixtral, Qwen2 and Qwen3, dense and of experts: one decoder, whose differences are in its
configuration."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.attention import Attention
from engine.config import ModelConfig
from engine.expert_load import new_table
from engine.loading import Loader
from engine.parallel.link import Link
from engine.parallel.plan import ParallelPlan, Shard
from engine.step_inputs import StepInputs
from engine.weights import Checkpoint
from kernels import rms_norm


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
        self.layers = [loader.layer(i) for i in shard.layers]
        if shard.is_first:
            self.embedding = loader.embedding()
        if shard.is_last:
            self.head = loader.head()
            self.norm = loader.tensor("model.norm.weight")
        self.attention = Attention(config, shard, link, dtype=dtype, device=device, max_len=max_len)

    def forward(self, inputs: StepInputs, pool: Tensor, hidden: Tensor | None = None) -> Tensor:
        """Through the shard's layers, writing the tokens' KV to ``pool``: [num_tokens, hidden].

        ``hidden``: what the stage before returned, None for the first. The last stage's is normed.
        """
        eps, shard = self.config.rms_norm_eps, self.shard
        hidden = self.embed(inputs.token_ids) if hidden is None else hidden
        residual = hidden
        for i, layer in enumerate(self.layers):
            if i == 0:
                x = rms_norm(hidden, layer.input_norm, eps)
            else:
                x, residual = rms_norm(hidden, layer.input_norm, eps, residual=residual)
            attended = self.attention(layer.qkv(x), inputs, pool, i, layer)
            hidden = self._sum(layer.o(attended))
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
