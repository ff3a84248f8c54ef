"""A layer's mixture of experts as a whole: router, grouping, products, combination."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from moonpool.bench.kernels.contest import contest
from moonpool.bench.kernels.device_limits import Machine, Work, name_of
from moonpool.engine.experts.mixture import Experts, MixtureOfExperts, Router
from moonpool.kernels.dispatch import silu_mul
from moonpool.kernels.packed import PackedExperts, PackedLinear
from moonpool.runtime.reports.report import Row


@dataclass(frozen=True)
class MixtureShape:
    name: str
    hidden: int
    inter: int  # of one expert
    experts: int
    top_k: int


SMALL = MixtureShape("small mixture", 256, 128, 16, 4)
# Mixtral-8x7B's, and a quarter of Qwen3-30B-A3B's experts.
LARGE = (MixtureShape("Mixtral's", 4096, 14336, 8, 2), MixtureShape("Qwen3-30B-A3B's", 2048, 768, 32, 8))


@dataclass(frozen=True)
class Weights:
    """One layer's: gate [experts, hidden], gate_up [experts, 2 * inter, hidden],
    down [experts, hidden, inter]."""

    gate: Tensor
    gate_up: Tensor
    down: Tensor
    top_k: int

    @classmethod
    def random(cls, shape: MixtureShape, machine: Machine) -> Weights:
        def weight(*size: int) -> Tensor:
            return torch.empty(size, device=machine.device).normal_(std=0.05).bfloat16().to(machine.dtype)

        return cls(
            weight(shape.experts, shape.hidden),
            weight(shape.experts, 2 * shape.inter, shape.hidden),
            weight(shape.experts, shape.hidden, shape.inter),
            shape.top_k,
        )

    def layer(self) -> MixtureOfExperts:
        return MixtureOfExperts(
            Router(PackedLinear(self.gate), self.top_k, renormalize=True),
            Experts(PackedExperts(self.gate_up), PackedExperts(self.down), silu_mul),
            shared=None,
            load=torch.zeros(len(self.gate), dtype=torch.int64, device=self.gate.device),
        )

    def looped(self, x: Tensor) -> Tensor:
        """The eager form of transformers: expert by expert, over the tokens that chose it."""
        weights, ids = (x @ self.gate.T).softmax(-1).topk(self.top_k)
        weights = weights / weights.sum(-1, keepdim=True)
        out = torch.zeros_like(x)
        for expert in sorted(set(ids.flatten().tolist())):
            token, choice = torch.where(ids == expert)
            gate, up = F.linear(x[token], self.gate_up[expert]).chunk(2, dim=-1)
            rows = F.linear(F.silu(gate) * up, self.down[expert])
            out.index_add_(0, token, rows * weights[token, choice, None])
        return out

    def double(self) -> Weights:
        return Weights(self.gate.double(), self.gate_up.double(), self.down.double(), self.top_k)


def mixture_rows(machine: Machine, quick: bool) -> Iterator[Row]:
    """Against reading the weights of the chosen experts, or against their products."""
    for shape in LARGE[: 1 if quick else 2] if machine.is_cuda else (SMALL,):
        expert_nbytes = 3 * shape.inter * shape.hidden * 2
        copies = max(1, machine.cold_nbytes // (shape.experts * expert_nbytes))
        weights = [Weights.random(shape, machine) for _ in range(copies)]
        for tokens in (1, 8) if quick else (1, 8, 64, 512):
            yield from _mixture(machine, shape, weights, tokens)


def _mixture(machine: Machine, shape: MixtureShape, weights: list[Weights], tokens: int) -> Iterator[Row]:
    layers, copies = [of_layer.layer() for of_layer in weights], len(weights)
    x = torch.randn(tokens, shape.hidden, device=machine.device).to(machine.dtype)
    chosen = sum(len(set(layer.router(x)[1].flatten().tolist())) for layer in layers)
    flops = 2 * tokens * shape.top_k * 3 * shape.inter * shape.hidden
    read = chosen / copies * 3 * shape.inter * shape.hidden * 2
    reading = read / machine.limits["read"] > flops / machine.limits["matmul"]
    loop: dict[str, Work] = {}
    if not machine.is_cuda:  # a recorded graph cannot loop over ids that only the device knows
        loop["loop over experts"] = lambda: [of_layer.looped(x) for of_layer in weights]
    yield from contest(
        machine,
        f"{shape.name}, {shape.top_k} of {shape.experts} experts of {shape.hidden}x{shape.inter}, "
        f"{name_of(machine.dtype)}, weights bfloat16, {tokens} tokens",
        lambda: [layer(x) for layer in layers],
        calls=copies,
        amount=read if reading else flops,
        limit="read" if reading else "matmul",
        error=lambda: (layers[0](x), weights[0].double().looped(x.double())),
        peers=loop,
    )
