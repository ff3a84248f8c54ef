"""What the fast forms of experts, adapters and layouts take on trust, verified: a function for each, by
name.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moonpool.kernels.checks.require import require, require_tensor


def route_experts(logits: Tensor, k: int, *, renormalize: bool) -> None:
    require(logits.dim() == 2 and 0 < k <= logits.shape[1], f"{k} experts of {list(logits.shape)} logits")


def group_by_expert(expert_ids: Tensor, num_experts: int) -> None:
    require_tensor("expert_ids", expert_ids, torch.int32, *expert_ids.shape[:2])
    inside = bool(((expert_ids >= 0) & (expert_ids < num_experts)).all())
    require(inside, f"an expert id lies outside of 0 … {num_experts - 1}")


def group_rows(x: Tensor, order: Tensor, k: int) -> None:
    require(x.dim() == 2, f"x must be [n, width], is {list(x.shape)}")
    require_tensor("order", order, torch.int64, x.shape[0] * k)
    require(sorted(order.tolist()) == list(range(order.shape[0])), "order must name each choice once")


def grouped_matmul(x: Tensor, weights: Tensor, offsets: Tensor) -> None:
    require(weights.dim() == 3, f"weights must be [experts, out, in], are {list(weights.shape)}")
    require_tensor("x", x, weights.dtype, *x.shape[:1], weights.shape[2])
    require_tensor("offsets", offsets, torch.int32, weights.shape[0] + 1)
    bounds = offsets.tolist()
    require(bounds[0] == 0 and sorted(bounds) == bounds and bounds[-1] <= x.shape[0], f"offsets {bounds}")


def combine_experts(rows: Tensor, order: Tensor, weights: Tensor) -> None:
    require_tensor("weights", weights, torch.float32, *weights.shape[:2])
    require_tensor("order", order, torch.int64, weights.numel())
    require(rows.dim() == 2 and rows.shape[0] == order.shape[0], f"rows of shape {list(rows.shape)}")
    require(sorted(order.tolist()) == list(range(order.shape[0])), "order must name each choice once")


def add_lora(y: Tensor, x: Tensor, a: Tensor, b: Tensor, adapter_ids: Tensor, scales: Tensor) -> None:
    require(a.dim() == 3 and b.dim() == 3, "a is [adapters, rank, in], b is [adapters, out, rank]")
    adapters, rank, ins = a.shape
    require_tensor("a", a, x.dtype, adapters, rank, ins)
    require_tensor("b", b, x.dtype, adapters, b.shape[1], rank)
    require_tensor("x", x, x.dtype, x.shape[0], ins)
    require_tensor("y", y, x.dtype, x.shape[0], b.shape[1])
    require_tensor("adapter_ids", adapter_ids, torch.int32, x.shape[0])
    require_tensor("scales", scales, torch.float32, adapters)
    inside = bool(((adapter_ids >= -1) & (adapter_ids < adapters)).all())
    require(inside, f"an adapter id lies outside of -1 … {adapters - 1}")
