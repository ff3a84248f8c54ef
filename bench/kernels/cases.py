"""What is measured: linear layers, attention, and a whole decode step made of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.kernels.clock import Work, seconds_of
from bench.kernels.step import DecodeStep
from bench.report import Row, versus
from kernels import PackedLinear, paged_decode_attention, paged_prefill_attention

TORCH = "torch"
# Bytes that no cache of a core keeps: weights and pages are rotated over so many.
COLD_NBYTES = 64 << 20


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class LinearCase:
    """in_features → out_features; ``stored`` is the weight's dtype, ``dtype`` that of the activations."""

    in_features: int
    out_features: int
    dtype: torch.dtype
    stored: torch.dtype

    def rows(self, num_rows: tuple[int, ...], rounds: int) -> Iterator[Row]:
        nbytes = self.in_features * self.out_features * self.stored.itemsize
        copies = max(1, min(256, COLD_NBYTES // nbytes))
        weights = [torch.randn(self.out_features, self.in_features).to(self.stored) for _ in range(copies)]
        packed = [PackedLinear(weight) for weight in weights]
        plain = [weight.to(self.dtype) for weight in weights]
        case = f"linear {self.in_features}x{self.out_features} {name_of(self.dtype)}"
        if self.stored is not self.dtype:
            case += f", weight {name_of(self.stored)}"
        for n in num_rows:
            x = torch.randn(n, self.in_features).to(self.dtype)
            contestants: dict[str, Work] = {
                "ours": lambda x=x: [linear(x) for linear in packed],  # type: ignore[misc]
                TORCH: lambda x=x: [F.linear(x, weight) for weight in plain],  # type: ignore[misc]
            }
            seconds = seconds_of(contestants, rounds)
            flops = 2 * n * self.in_features * self.out_features * copies / 1e9
            row = Row(f"{case}, {n} rows", "rate", flops / seconds["ours"], "GFLOP/s")
            yield versus(row, TORCH, flops / seconds[TORCH])
            yield Row(f"{case}, {n} rows", "weights read", nbytes * copies / seconds["ours"] / 1e9, "GB/s")


@dataclass(frozen=True)
class AttentionCase:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype

    @property
    def name(self) -> str:
        heads = f"{self.num_heads}/{self.num_kv_heads} heads of {self.head_dim}"
        return f"{heads}, blocks of {self.block_size}, {name_of(self.dtype)}"

    def pool(self, num_blocks: int, layers: int) -> Tensor:
        shape = (num_blocks, layers, 2, self.num_kv_heads, self.block_size, self.head_dim)
        return torch.randn(shape).to(self.dtype)

    def decode_row(self, batch: int, context: int, rounds: int) -> Row:
        """Bytes of K and V read a second, against a plain read of memory in the same run."""
        blocks = -(-context // self.block_size)
        token_nbytes = 2 * self.num_kv_heads * self.head_dim * self.dtype.itemsize
        layer_nbytes = batch * blocks * self.block_size * token_nbytes
        layers = max(2, COLD_NBYTES // layer_nbytes)
        pool = self.pool(batch * blocks, layers)
        table = torch.randperm(batch * blocks).to(torch.int32).view(batch, blocks)
        lens = torch.full((batch,), context, dtype=torch.int32)
        q = torch.randn(batch, self.num_heads, self.head_dim).to(self.dtype)
        memory = torch.zeros(max(COLD_NBYTES * 4, 1 << 28) // 4)

        def ours() -> None:
            for layer in range(layers):
                paged_decode_attention(q, pool, layer, table, lens, scale=self.head_dim**-0.5)

        seconds = seconds_of({"ours": ours, "read": memory.sum}, rounds)
        ours_gb_s = layers * batch * context * token_nbytes / seconds["ours"] / 1e9
        row = Row(
            f"decode attention {self.name}, batch {batch}, context {context}",
            "KV read",
            ours_gb_s,
            "GB/s",
            limit="at least",
            limit_value=0.6,
        )
        return versus(row, "plain read", memory.nbytes / seconds["read"] / 1e9)

    def prefill_row(self, new: int, context: int, rounds: int) -> Row:
        """Multiply-adds that the causal mask leaves, a second, against SDPA on dense tensors of the same
        work."""
        blocks = -(-context // self.block_size)
        pool = self.pool(blocks, 1)
        table = torch.randperm(blocks).to(torch.int32).view(1, blocks)
        starts, lens = torch.tensor([0, new], dtype=torch.int32), torch.tensor([context], dtype=torch.int32)
        q = torch.randn(new, self.num_heads, self.head_dim).to(self.dtype)
        dense_q = q.transpose(0, 1)[None]
        k, v = torch.randn(2, 1, self.num_heads, context, self.head_dim).to(self.dtype).unbind(0)
        mask = torch.ones(new, context, dtype=torch.bool).tril(context - new)
        scale = self.head_dim**-0.5
        contestants: dict[str, Work] = {
            "ours": lambda: paged_prefill_attention(q, pool, 0, table, starts, lens, scale=scale),
            TORCH: lambda: F.scaled_dot_product_attention(dense_q, k, v, attn_mask=mask, scale=scale),
        }
        seconds = seconds_of(contestants, rounds)
        pairs = new * context - new * (new - 1) / 2
        flops = 4 * self.num_heads * self.head_dim * pairs / 1e9
        case = f"prefill attention {self.name}, {new} new of {context}"
        row = Row(case, "rate", flops / seconds["ours"], "GFLOP/s")
        return versus(row, f"{TORCH} SDPA, dense", flops / seconds[TORCH])


def step_row(
    dtype: torch.dtype, stored: torch.dtype, batch: int, context: int, limit_ms: float | None, rounds: int
) -> Row:
    """A decode step of a model of the shipped one's shape, from token ids to token ids."""
    step = DecodeStep(dtype, stored, batch, context)
    seconds = seconds_of({"ours": step.run}, rounds)["ours"]
    case = f"decode step of the shipped model's shape, {name_of(dtype)}, weights {name_of(stored)}"
    case += f", batch {batch}, context {context}"
    limit = None if limit_ms is None else "at most"
    return Row(case, "CPU time", seconds * 1e3, "ms", limit=limit, limit_value=limit_ms)
