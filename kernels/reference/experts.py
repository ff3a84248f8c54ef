"""Mixtures of experts: which experts a token goes to, and the matrix products of tokens grouped by expert."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from moonpool.kernels.reference.precision import wide


def route_experts(logits: Tensor, k: int, *, renormalize: bool) -> tuple[Tensor, Tensor]:
    """logits: [n, num_experts]. Returns weights float32 [n, k], largest first, and expert ids int32 [n, k].

    The weights are the softmax over all experts, and with ``renormalize`` (Mixtral; Qwen where its config
    says norm_topk_prob) they sum to 1 over the k. Of equal experts the first wins.
    """
    probabilities = wide(logits).softmax(-1).float()
    weights, ids = probabilities.sort(dim=-1, descending=True, stable=True)
    weights, ids = weights[:, :k], ids[:, :k]
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights.contiguous(), ids.int().contiguous()


def group_by_expert(expert_ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """expert_ids: int32 [n, k]. Returns order int64 [n * k] and offsets int32 [num_experts + 1].

    Rows offsets[e] … offsets[e + 1] - 1 of the grouped rows are expert e's; grouped row i is that of choice
    order[i] % k of token order[i] // k. Tokens of one expert keep their order.
    """
    grouped, order = expert_ids.flatten().sort(stable=True)
    # Nothing here waits for the device: a GPU's steps are recorded.
    experts = torch.arange(num_experts + 1, dtype=torch.int32, device=grouped.device)
    return order, torch.searchsorted(grouped, experts, out_int32=True)


def group_rows(x: Tensor, order: Tensor, k: int) -> Tensor:
    """x: [n, width]; order: int64 [n * k]. Returns the row of each choice's token, as ``group_by_expert``
    orders them: [n * k, width].
    """
    return x[order // k]


def grouped_matmul(x: Tensor, weights: Tensor, offsets: Tensor) -> Tensor:
    """x: [m, in], rows offsets[e] … offsets[e + 1] - 1 for expert e; weights: [num_experts, out, in];
    offsets: int32 [num_experts + 1]. Returns [m, out]; rows beyond offsets[-1] are zeros."""
    out = x.new_zeros((x.shape[0], weights.shape[1]))
    bounds = offsets.tolist()
    for expert, (start, end) in enumerate(pairwise(bounds)):
        if start < end:
            out[start:end] = (wide(x[start:end]) @ wide(weights[expert]).T).to(x.dtype)
    return out


def combine_experts(rows: Tensor, order: Tensor, weights: Tensor) -> Tensor:
    """rows: [n * k, hidden], grouped as ``order`` says; weights: float32 [n, k]. Returns the weighted sum
    of each token's k rows: [n, hidden].
    """
    n, k = weights.shape
    ungrouped = torch.empty_like(rows)
    ungrouped[order] = rows
    chosen = wide(ungrouped).view(n, k, rows.shape[1])
    return (chosen * weights[..., None].to(chosen.dtype)).sum(1).to(rows.dtype)
