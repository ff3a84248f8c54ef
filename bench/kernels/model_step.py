"""A step of a model made of the kernels alone, with random weights: what its shape costs at the least."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from moonpool.bench.kernels.contest import not_measured
from moonpool.bench.kernels.device_limits import Machine, name_of
from moonpool.kernels import (
    PackedLinear,
    argmax_rows,
    paged_decode_attention,
    paged_prefill_attention,
    rms_norm,
    rotate_and_write,
    silu_mul,
)
from moonpool.runtime.reports.report import Row, versus

EPS = 1e-5


@dataclass(frozen=True)
class ModelShape:
    name: str
    hidden: int
    inter: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    block_size: int = 16

    @property
    def layer_parameters(self) -> int:
        """Of the linear layers of one layer."""
        qkv = (self.heads + 2 * self.kv_heads) * self.head_dim
        return self.hidden * (qkv + self.heads * self.head_dim + 3 * self.inter)

    def weights_nbytes(self, dtype: torch.dtype) -> int:
        """That a step reads: every linear layer and the head."""
        return (self.layers * self.layer_parameters + self.hidden * self.vocab) * dtype.itemsize

    def kv_nbytes(self, tokens: int, dtype: torch.dtype) -> int:
        return tokens * self.layers * 2 * self.kv_heads * self.head_dim * dtype.itemsize


SHIPPED = ModelShape("the shipped model's shape", 256, 704, 6, 8, 4, 32, 2048)
LLAMA_8B = ModelShape("Llama-3-8B's shape", 4096, 14336, 32, 32, 8, 128, 128256)


@dataclass(frozen=True)
class _Layer:
    input_norm: Tensor
    qkv: PackedLinear
    o: PackedLinear
    post_norm: Tensor
    gate_up: PackedLinear
    down: PackedLinear


class ModelStep:
    """Every sequence of the batch computes ``new`` tokens, the last of its ``context``."""

    def __init__(
        self,
        shape: ModelShape,
        dtype: torch.dtype,
        stored: torch.dtype,
        batch: int,
        new: int,
        context: int,
        device: torch.device,
    ) -> None:
        def weight(*size: int) -> Tensor:
            return torch.empty(size, dtype=stored, device=device).normal_(std=0.02).to(dtype)

        def ones() -> Tensor:
            return torch.ones(shape.hidden, dtype=dtype, device=device)

        heads, kv_heads, dim, hidden = shape.heads, shape.kv_heads, shape.head_dim, shape.hidden
        self.shape, self.new = shape, new
        self.layers = [
            _Layer(
                ones(),
                PackedLinear(weight((heads + 2 * kv_heads) * dim, hidden)),
                PackedLinear(weight(hidden, heads * dim)),
                ones(),
                PackedLinear(weight(2 * shape.inter, hidden)),
                PackedLinear(weight(hidden, shape.inter)),
            )
            for _ in range(shape.layers)
        ]
        self.embedding = weight(shape.vocab, hidden)
        self.norm, self.head = ones(), PackedLinear(self.embedding)
        self.cos, self.sin = torch.randn(2, context, dim // 2, device=device).unbind(0)
        size = shape.block_size
        blocks = -(-context // size)
        pool = (batch * blocks, shape.layers, 2, kv_heads, size, dim)
        self.pool = torch.empty(pool, dtype=dtype, device=device).normal_()
        self.table = torch.arange(batch * blocks, dtype=torch.int32, device=device).view(batch, blocks)
        self.lens = torch.full((batch,), context, dtype=torch.int32, device=device)
        self.starts = torch.arange(0, batch * new + 1, new, dtype=torch.int32, device=device)
        at = torch.arange(context - new, context, device=device)
        self.positions = at.repeat(batch)
        self.slots = (self.table.long()[:, at // size] * size + at % size).flatten()
        self.ids = torch.randint(0, shape.vocab, (batch * new,), device=device)
        self.last = torch.arange(new - 1, batch * new, new, device=device)

    @torch.inference_mode()
    def run(self) -> Tensor:
        shape = self.shape
        scale, width = shape.head_dim**-0.5, shape.heads * shape.head_dim
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
                num_heads=shape.heads,
                num_kv_heads=shape.kv_heads,
                head_dim=shape.head_dim,
            )
            if self.new == 1:
                seen = paged_decode_attention(q, self.pool, i, self.table, self.lens, scale=scale)
            else:
                seen = paged_prefill_attention(
                    q, self.pool, i, self.table, self.starts, self.lens, scale=scale
                )
            hidden = layer.o(seen.view(-1, width))
            x, residual = rms_norm(hidden, layer.post_norm, EPS, residual=residual)
            hidden = layer.down(silu_mul(layer.gate_up(x)))
        x, _ = rms_norm(hidden, self.norm, EPS, residual=residual)
        return argmax_rows(self.head(x[self.last]))


def shipped_row(
    machine: Machine, dtype: torch.dtype, stored: torch.dtype, batch: int, limit_ms: float | None
) -> Row:
    """A decode step of the shipped model's shape on a CPU, from token ids to token ids."""
    step = ModelStep(SHIPPED, dtype, stored, batch, 1, 192, machine.device)
    seconds = machine.clock.seconds_of({"ours": step.run}, machine.rounds)["ours"]
    case = f"decode step of {SHIPPED.name}, {name_of(dtype)}, weights {name_of(stored)}"
    case += f", batch {batch}, context 192"
    limit = None if limit_ms is None else "at most"
    return Row(case, "CPU time", seconds * 1e3, "ms", limit=limit, limit_value=limit_ms)


# Times the floor.
DECODE_OF_FLOOR, PROMPT_OF_FLOOR = 1.3, 1.5


def llama_rows(machine: Machine, shape: ModelShape = LLAMA_8B) -> Iterator[Row]:
    """The whole step of a served model against the bytes it must read or the FLOP it must do."""
    dtype = machine.dtype
    for batch, new, context in ((64, 1, 2048), (1, 8192, 8192)):
        what = "decode step" if new == 1 else "prompt"
        case = f"{what} of {shape.name}, {name_of(dtype)}, batch {batch}, context {context}"
        weights, kv = shape.weights_nbytes(dtype), shape.kv_nbytes(batch * context, dtype)
        needed = 1.2 * (weights + kv) + batch * new * (2 * shape.inter + 6 * shape.hidden) * dtype.itemsize
        if needed > machine.free_nbytes:
            yield not_measured(case, "it does not fit in memory", needed / 2**30, "GiB")
            continue
        step = ModelStep(shape, dtype, dtype, batch, new, context, machine.device)
        seconds = machine.clock.seconds_of({"ours": step.run}, machine.rounds)["ours"]
        if new == 1:
            floor_s, bound = (weights + kv) / machine.limits["copy"], DECODE_OF_FLOOR
        else:
            attended = 2 * shape.heads * shape.head_dim * new * new  # QK and PV, the causal half
            flops = batch * shape.layers * (2 * new * shape.layer_parameters + attended)
            floor_s, bound = flops / machine.limits["matmul"], PROMPT_OF_FLOOR
        row = Row(case, "time", seconds * 1e3, "ms", limit="at most", limit_value=bound)
        yield versus(row, "floor", floor_s * 1e3)
        del step
