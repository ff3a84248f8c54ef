"""Latent attention in the absorbed form: queries are projected to the space of latents, results from it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from moonpool.engine.checkpoint.config import LatentConfig
from moonpool.kernels.dispatch import rms_norm
from moonpool.kernels.quantised import Linear

_EPS = 1e-6  # of the norms of projections, in every checkpoint


@dataclass(slots=True)
class LatentInput:
    """x: [n, hidden] → [n, (heads + 1) × (rope_dim + kv_rank)]: each head's query of latents, then the
    token's latent. Elements that will be rotated come first, as halves.
    """

    config: LatentConfig
    q_a: Linear | None
    q_a_norm: Tensor | None
    q: Linear
    kv_a: Linear
    kv_a_norm: Tensor
    up_k: Tensor  # [heads, nope_dim, kv_rank]

    def __call__(self, x: Tensor) -> Tensor:
        n, heads, rope, nope = len(x), len(self.up_k), self.config.rope_dim, self.config.nope_dim
        low = x
        if self.q_a is not None:
            assert self.q_a_norm is not None
            low = rms_norm(self.q_a(x), self.q_a_norm, _EPS)
        q, kv = self.q(low).view(n, heads, nope + rope), self.kv_a(x)
        latent, key = kv[:, : self.config.kv_rank].contiguous(), kv[:, self.config.kv_rank :]
        out = x.new_empty((n, heads + 1, rope + self.config.kv_rank))
        out[:, :-1, :rope] = self._halves(q[..., nope:])
        out[:, :-1, rope:] = torch.bmm(q[..., :nope].transpose(0, 1), self.up_k).transpose(0, 1)
        out[:, -1, :rope] = self._halves(key)
        out[:, -1, rope:] = rms_norm(latent, self.kv_a_norm, _EPS)
        return out.view(n, -1)

    def _halves(self, x: Tensor) -> Tensor:
        """Return pairs (2 j, 2 j + 1) of the last dimension as (j, rope_dim / 2 + j)."""
        if not self.config.is_interleaved:
            return x
        return x.reshape(*x.shape[:-1], -1, 2).transpose(-1, -2).flatten(-2)


@dataclass(slots=True)
class LatentOutput:
    """attended: [n, heads × (rope_dim + kv_rank)], sums of latents → [n, hidden], with tp a summand."""

    config: LatentConfig
    up_v: Tensor  # [heads, kv_rank, v_dim]
    o: Callable[[Tensor], Tensor]

    def __call__(self, attended: Tensor) -> Tensor:
        n, heads = len(attended), len(self.up_v)
        latents = attended.view(n, heads, -1)[..., self.config.rope_dim :]
        values = torch.bmm(latents.transpose(0, 1), self.up_v).transpose(0, 1)
        return self.o(values.reshape(n, -1))
