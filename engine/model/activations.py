"""The gated activations of MLPs: [n, 2 × inter], gates first → [n, inter]."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from moonpool.kernels import silu_mul

Activation = Callable[[Tensor], Tensor]


def gelu_tanh_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh").mul_(up)


ACTIVATIONS: dict[str, Activation] = {"silu": silu_mul, "gelu_tanh": gelu_tanh_mul}
