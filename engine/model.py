"""Llama, Mistral, Qwen2 and Qwen3: one decoder, whose differences are in its configuration."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.config import ModelConfig
from engine.loading import Loader
from engine.rope import rope_tables
from engine.weights import Checkpoint
from kernels import (
    paged_decode_attention,
    paged_prefill_attention,
    rms_norm,
    rotate_and_write,
    silu_mul,
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


class Model:
    """The weights and the forward pass. Holds no state of any sequence: that is all in the pool."""

    def __init__(
        self,
        config: ModelConfig,
        checkpoint: Checkpoint,
        *,
        dtype: torch.dtype,
        device: torch.device,
        max_len: int,
    ) -> None:
        """Load the checkpoint, computing in ``dtype``. Raises CheckpointError before anything is loaded."""
        loader = Loader(config, checkpoint, dtype, device)
        self.config = config
        self.dtype = dtype
        self.scale = config.head_dim**-0.5
        self.embedding, self.head = loader.embedding_and_head()
        self.layers = [loader.layer(i) for i in range(config.num_layers)]
        self.norm = loader.tensor("model.norm.weight")
        cos, sin = rope_tables(config.rope, config.head_dim, max_len, dtype)
        self.cos, self.sin = cos.to(device), sin.to(device)

    def forward(self, inputs: StepInputs, pool: Tensor) -> Tensor:
        """The last hidden states, normed: [num_tokens, hidden]. Writes the tokens' KV to ``pool``."""
        config = self.config
        eps, scale, head_dim = config.rms_norm_eps, self.scale, config.head_dim
        hidden = F.embedding(inputs.token_ids, self.embedding).to(self.dtype)
        num_tokens = hidden.shape[0]
        residual = hidden
        for i, layer in enumerate(self.layers):
            if i == 0:
                x = rms_norm(hidden, layer.input_norm, eps)
            else:
                x, residual = rms_norm(hidden, layer.input_norm, eps, residual=residual)
            q = rotate_and_write(
                layer.qkv(x),
                inputs.positions,
                self.cos,
                self.sin,
                pool,
                i,
                inputs.slots,
                num_heads=config.num_heads,
                num_kv_heads=config.num_kv_heads,
                head_dim=head_dim,
                q_norm=layer.q_norm,
                k_norm=layer.k_norm,
                eps=eps,
            )
            attended = self._attend(q, inputs, pool, i, scale, layer.window)
            hidden = layer.o(attended.view(num_tokens, -1))
            x, residual = rms_norm(hidden, layer.post_norm, eps, residual=residual)
            hidden = layer.down(silu_mul(layer.gate_up(x)))
        normed, _ = rms_norm(hidden, self.norm, eps, residual=residual)
        return normed

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden: [n, hidden]. Returns [n, vocab_size] in the dtype computed in."""
        return self.head(hidden)

    @staticmethod
    def _attend(q: Tensor, inputs: StepInputs, pool: Tensor, layer: int, scale: float, window: int) -> Tensor:
        """q: [num_tokens, num_heads, head_dim]; returns the same shape."""
        n = inputs.num_decodes
        if inputs.chunk_table is None:
            return paged_decode_attention(
                q, pool, layer, inputs.decode_table, inputs.decode_lens, scale=scale, window=window
            )
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
                scale=scale,
                window=window,
                out=out[:n],
            )
        paged_prefill_attention(
            q[n:],
            pool,
            layer,
            inputs.chunk_table,
            inputs.chunk_starts,
            inputs.chunk_lens,
            scale=scale,
            window=window,
            out=out[n:],
        )
        return out
