"""The gated activations of MLPs: [n, 2 × inter], gates first → [n, inter]."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from moonpool.kernels.dispatch import silu_mul

Activation = Callable[[Tensor], Tensor]


def gelu_tanh_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh").mul_(up)


def clamped_mul(gate_up: Tensor) -> Tensor:
    """gpt-oss: gate · σ(1.702 gate) · (up + 1), of values clamped at 7."""
    gate, up = gate_up.chunk(2, dim=-1)
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return (gate * (gate * 1.702).sigmoid_()).mul_(up.add_(1.0))


ACTIVATIONS: dict[str, Activation] = {"silu": silu_mul, "gelu_tanh": gelu_tanh_mul, "clamped": clamped_mul}
