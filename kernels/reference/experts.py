"""Mixture of experts: routing, and matrix products of tokens grouped by expert."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from moonpool.kernels.reference.dtypes import to_compute_dtype


def route_experts(logits: Tensor, k: int, *, renormalize: bool) -> tuple[Tensor, Tensor]:
    """Choose k experts for each token: weights float32 [n, k], largest first, and expert ids int32 [n, k].

    logits: [n, num_experts]. The weights are the softmax over all experts; with ``renormalize`` (Mixtral;
    Qwen with norm_topk_prob) they sum to 1 over the k. Of equal experts the first wins.
    """
    probabilities = to_compute_dtype(logits).softmax(-1).float()
    weights, ids = probabilities.sort(dim=-1, descending=True, stable=True)
    weights, ids = weights[:, :k], ids[:, :k]
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights.contiguous(), ids.int().contiguous()


def group_by_expert(expert_ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Group choices by expert: order int64 [n * k] and offsets int32 [num_experts + 1].

    expert_ids: int32 [n, k]. Grouped rows offsets[e] … offsets[e + 1] - 1 belong to expert e; grouped row i
    is choice order[i] % k of token order[i] // k. Tokens of one expert keep their order.
    """
    grouped, order = expert_ids.flatten().sort(stable=True)
    # Nothing here synchronizes with the device, because steps are captured as CUDA graphs.
    experts = torch.arange(num_experts + 1, dtype=torch.int32, device=grouped.device)
    return order, torch.searchsorted(grouped, experts, out_int32=True)


def group_rows(x: Tensor, order: Tensor, k: int) -> Tensor:
    """Copy the row of each choice's token, in the order of ``group_by_expert``: [n * k, width].

    x: [n, width]; order: int64 [n * k].
    """
    return x[order // k]


def grouped_matmul(x: Tensor, weights: Tensor, offsets: Tensor) -> Tensor:
    """Multiply rows offsets[e] … offsets[e + 1] - 1 of x by the weights of expert e: [m, out].

    x: [m, in]; weights: [num_experts, out, in]; offsets: int32 [num_experts + 1]. Rows beyond offsets[-1]
    give zeros.
    """
    out = x.new_zeros((x.shape[0], weights.shape[1]))
    bounds = offsets.tolist()
    for expert, (start, end) in enumerate(pairwise(bounds)):
        if start < end:
            out[start:end] = (to_compute_dtype(x[start:end]) @ to_compute_dtype(weights[expert]).T).to(
                x.dtype
            )
    return out


def combine_experts(rows: Tensor, order: Tensor, weights: Tensor) -> Tensor:
    """The weighted sum of each token's k rows: [n, hidden].

    rows: [n * k, hidden], grouped as in ``order``; weights: float32 [n, k].
    """
    n, k = weights.shape
    ungrouped = torch.empty_like(rows)
    ungrouped[order] = rows
    chosen = to_compute_dtype(ungrouped).view(n, k, rows.shape[1])
    return (chosen * weights[..., None].to(chosen.dtype)).sum(1).to(rows.dtype)
