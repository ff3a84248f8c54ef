"""Llama, Mistral, Qwen2 and Qwen3: one decoder, whose differences are in its configuration."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.config import ModelConfig
from engine.rope import rope_tables
from engine.weights import Checkpoint, expected_tensors
from kernels import (
    PackedLinear,
    paged_decode_attention,
    paged_prefill_attention,
    rms_norm,
    rotate_and_write,
    silu_mul,
)


@dataclass(slots=True)
class StepInputs:
    """The tensors of one step: num_decodes tokens of decoding sequences, then the tokens of the prompt
    chunks.
    """

    token_ids: Tensor  # int64 [num_tokens]
    positions: Tensor  # int64 [num_tokens]
    slots: Tensor  # int64 [num_tokens]: block * block_size + offset
    num_decodes: int
    decode_table: Tensor  # int32 [num_decodes, max_blocks], padded with -1
    decode_lens: Tensor  # int32 [num_decodes], the new token included
    chunk_table: Tensor | None = None  # int32 [num_chunks, max_blocks]
    chunk_starts: Tensor | None = None  # int32 [num_chunks + 1], cumulative new tokens
    chunk_lens: Tensor | None = None  # int32 [num_chunks], cached and new tokens


@dataclass(slots=True)
class Layer:
    input_norm: Tensor
    qkv: PackedLinear
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: PackedLinear
    post_norm: Tensor
    gate_up: PackedLinear
    down: PackedLinear
    window: int


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
        checkpoint.check(expected_tensors(config))
        self.config = config
        self.dtype = dtype
        self.scale = config.head_dim**-0.5
        self._checkpoint = checkpoint
        self._device = device
        self.embedding = self._tensor("model.embed_tokens.weight")
        self.layers = [self._layer(i) for i in range(config.num_layers)]
        self.norm = self._tensor("model.norm.weight")
        head = self.embedding if config.tie_word_embeddings else self._tensor("lm_head.weight")
        self.head = PackedLinear(head)
        cos, sin = rope_tables(config.rope, config.head_dim, max_len, dtype)
        self.cos, self.sin = cos.to(device), sin.to(device)

    @property
    def nbytes(self) -> int:
        """Bytes of the weights as computed with."""
        linears = (x for layer in self.layers for x in (layer.qkv, layer.o, layer.gate_up, layer.down))
        return self.embedding.nbytes + sum(linear.weight.nbytes for linear in linears)

    def forward(self, inputs: StepInputs, pool: Tensor) -> Tensor:
        """The last hidden states, normed: [num_tokens, hidden]. Writes the tokens' KV to ``pool``."""
        config = self.config
        eps, scale, head_dim = config.rms_norm_eps, self.scale, config.head_dim
        hidden = F.embedding(inputs.token_ids, self.embedding)
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

    # ------------------------------------------------------------------ loading

    def _layer(self, i: int) -> Layer:
        config = self.config
        attention, mlp = f"model.layers.{i}.self_attn", f"model.layers.{i}.mlp"
        norm = self._tensor if config.qk_norm else lambda _: None
        return Layer(
            input_norm=self._tensor(f"model.layers.{i}.input_layernorm.weight"),
            qkv=self._linear([f"{attention}.{part}_proj" for part in "qkv"], bias=config.qkv_bias),
            q_norm=norm(f"{attention}.q_norm.weight"),
            k_norm=norm(f"{attention}.k_norm.weight"),
            o=self._linear([f"{attention}.o_proj"], bias=config.o_bias),
            post_norm=self._tensor(f"model.layers.{i}.post_attention_layernorm.weight"),
            gate_up=self._linear([f"{mlp}.gate_proj", f"{mlp}.up_proj"], bias=config.mlp_bias),
            down=self._linear([f"{mlp}.down_proj"], bias=config.mlp_bias),
            window=config.windows[i],
        )

    def _linear(self, names: list[str], *, bias: bool) -> PackedLinear:
        """One matrix of several that read the same input: their rows one after the other."""
        weight = self._tensor(*(f"{name}.weight" for name in names))
        return PackedLinear(weight, self._tensor(*(f"{name}.bias" for name in names)) if bias else None)

    def _tensor(self, *names: str) -> Tensor:
        """The tensors, stacked along their first dimension, in our dtype, on our device, in our memory."""
        parts = [self._checkpoint.read(name).to(self._device, self.dtype) for name in names]
        return torch.cat(parts)
