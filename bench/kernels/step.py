"""A decode step made of the kernels alone: what a model of the shipped one's shape costs at the least."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import (
    PackedLinear,
    argmax_rows,
    paged_decode_attention,
    rms_norm,
    rotate_and_write,
    silu_mul,
)

HIDDEN, INTER, LAYERS, HEADS, KV_HEADS, DIM, VOCAB = 256, 704, 6, 8, 4, 32, 2048
BLOCK_SIZE, EPS = 16, 1e-5


@dataclass(frozen=True)
class _Layer:
    input_norm: Tensor
    qkv: PackedLinear
    o: PackedLinear
    post_norm: Tensor
    gate_up: PackedLinear
    down: PackedLinear


class DecodeStep:
    """Random weights; every sequence of the batch has ``context`` tokens, the new one included."""

    def __init__(self, dtype: torch.dtype, stored: torch.dtype, batch: int, context: int) -> None:
        def weight(*shape: int) -> Tensor:
            return (torch.randn(shape) * 0.05).to(stored).to(dtype)

        self.layers = [
            _Layer(
                torch.ones(HIDDEN, dtype=dtype),
                PackedLinear(weight((HEADS + 2 * KV_HEADS) * DIM, HIDDEN)),
                PackedLinear(weight(HIDDEN, HEADS * DIM)),
                torch.ones(HIDDEN, dtype=dtype),
                PackedLinear(weight(2 * INTER, HIDDEN)),
                PackedLinear(weight(HIDDEN, INTER)),
            )
            for _ in range(LAYERS)
        ]
        self.embedding = weight(VOCAB, HIDDEN)
        self.norm = torch.ones(HIDDEN, dtype=dtype)
        self.head = PackedLinear(self.embedding)
        self.cos, self.sin = torch.randn(2, context, DIM // 2).unbind(0)
        blocks = -(-context // BLOCK_SIZE)
        self.pool = torch.randn(batch * blocks, LAYERS, 2, KV_HEADS, BLOCK_SIZE, DIM).to(dtype)
        self.table = torch.arange(batch * blocks, dtype=torch.int32).view(batch, blocks)
        self.lens = torch.full((batch,), context, dtype=torch.int32)
        self.positions = torch.full((batch,), context - 1)
        self.slots = self.table[:, -1].long() * BLOCK_SIZE + (context - 1) % BLOCK_SIZE
        self.ids = torch.randint(0, VOCAB, (batch,))

    @torch.inference_mode()
    def run(self) -> Tensor:
        hidden = F.embedding(self.ids, self.embedding)
        residual = torch.zeros_like(hidden)
        for i, layer in enumerate(self.layers):
            x, residual = rms_norm(hidden, layer.input_norm, EPS, residual=residual)
            q = rotate_and_write(
                layer.qkv(x),
                self.positions,
                self.cos,
                self.sin,
                self.pool,
                i,
                self.slots,
                num_heads=HEADS,
                num_kv_heads=KV_HEADS,
                head_dim=DIM,
            )
            seen = paged_decode_attention(q, self.pool, i, self.table, self.lens, scale=DIM**-0.5)
            hidden = layer.o(seen.view(-1, HEADS * DIM))
            x, residual = rms_norm(hidden, layer.post_norm, EPS, residual=residual)
            hidden = layer.down(silu_mul(layer.gate_up(x)))
        x, _ = rms_norm(hidden, self.norm, EPS, residual=residual)
        return argmax_rows(self.head(x))
