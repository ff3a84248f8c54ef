"""Mixture of experts as a layer's MLP: route, group by expert, compute, combine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from moonpool.engine.experts.group_router import GroupRouter
from moonpool.kernels.dispatch import combine_experts, group_by_expert, group_rows, route_experts
from moonpool.kernels.packed import PackedExperts
from moonpool.kernels.quantised import Linear, QuantisedExperts


@dataclass(slots=True)
class Router:
    """x: [n, hidden] → weights float32 [n, top_k], largest first, and expert ids int32 [n, top_k].

    Every rank has the whole router and computes equal results for equal rows.
    """

    gate: Linear
    top_k: int
    renormalize: bool

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return route_experts(self.gate(x), self.top_k, renormalize=self.renormalize)

    def ranked(self, x: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Return scores float32 and ids of each token's ``count`` best experts, best first."""
        return route_experts(self.gate(x), count, renormalize=False)

    def normalized(self, scores: Tensor) -> Tensor:
        """Return the weights of chosen experts. scores: of ``ranked``, 0 where none is chosen."""
        return scores / scores.sum(-1, keepdim=True).clamp(min=1e-20) if self.renormalize else scores


@dataclass(slots=True)
class Experts:
    """rows: [m, hidden], of expert e from offsets[e] to offsets[e + 1] - 1; offsets: int32 [num_experts + 1]
    → [m, hidden], with tp a summand.
    """

    gate_up: PackedExperts | QuantisedExperts
    down: PackedExperts | QuantisedExperts
    activate: Callable[[Tensor], Tensor]
    gate_up_bias: Tensor | None = None  # [num_experts, 2 × inter]
    down_bias: Tensor | None = None  # [num_experts, hidden]

    def __call__(self, rows: Tensor, offsets: Tensor) -> Tensor:
        gate_up = _add_bias(self.gate_up(rows, offsets), self.gate_up_bias, offsets)
        return _add_bias(self.down(self.activate(gate_up), offsets), self.down_bias, offsets)


def _add_bias(rows: Tensor, bias: Tensor | None, offsets: Tensor) -> Tensor:
    """Add to each row its expert's bias, in place."""
    if bias is None:
        return rows
    row = torch.arange(len(rows), dtype=offsets.dtype, device=rows.device)
    return rows.add_(bias[torch.searchsorted(offsets[1:], row, right=True)])


@dataclass(slots=True)
class SharedExpert:
    """The MLP for all tokens, with a gate or without: [n, hidden] → [n, hidden]."""

    mlp: Callable[[Tensor], Tensor]
    gate: Linear | None  # one output per token

    def __call__(self, x: Tensor) -> Tensor:
        return self.mlp(x) if self.gate is None else self.mlp(x).mul_(torch.sigmoid(self.gate(x)))


@dataclass(slots=True)
class MixtureOfExperts:
    """x: [n, hidden] → [n, hidden], with tp a summand."""

    router: Router | GroupRouter
    experts: Callable[[Tensor, Tensor], Tensor]  # as Experts
    shared: SharedExpert | None
    load: Tensor  # int64 [num_experts]: rows of each expert

    def __call__(self, x: Tensor) -> Tensor:
        weights, ids = self.router(x)
        order, offsets = group_by_expert(ids, len(self.load))
        self.load += offsets.diff()
        rows = group_rows(x, order, self.router.top_k)
        out = combine_experts(self.experts(rows, offsets), order, weights)
        return out if self.shared is None else out.add_(self.shared(x))
