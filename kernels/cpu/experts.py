"""The C++ form of a mixture's steps: see ``moonpool.kernels.cpu.operations``."""

from __future__ import annotations

import torch
from torch import Tensor

from moonpool.kernels import reference
from moonpool.kernels.cpu.operations import LIBRARY

_route_experts = LIBRARY.held["route_experts"]
_combine_experts = LIBRARY.held["combine_experts"]
_group_by_expert = LIBRARY.held["group_by_expert"][None]
_group_rows = LIBRARY.held["group_rows"][None]
# Rows of more values than this (about 100 µs) are moved with Python's global lock given up.
_LONG_VALUES = 1 << 18
_combine_long = LIBRARY.freed["combine_experts"]
_group_rows_long = LIBRARY.freed["group_rows"][None]


def route_experts(logits: Tensor, k: int, *, renormalize: bool) -> tuple[Tensor, Tensor]:
    function = _route_experts.get(logits.dtype)
    if function is None or not logits.is_contiguous():
        return reference.route_experts(logits, k, renormalize=renormalize)
    n, num_experts = logits.shape
    weights = logits.new_empty((n, k), dtype=torch.float32)
    ids = logits.new_empty((n, k), dtype=torch.int32)
    function(logits.data_ptr(), weights.data_ptr(), ids.data_ptr(), n, num_experts, k, renormalize)
    return weights, ids


def group_by_expert(expert_ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    if not expert_ids.is_contiguous():
        expert_ids = expert_ids.contiguous()
    m = expert_ids.numel()
    order = expert_ids.new_empty(m, dtype=torch.int64)
    offsets = expert_ids.new_empty(num_experts + 1)
    _group_by_expert(expert_ids.data_ptr(), order.data_ptr(), offsets.data_ptr(), m, num_experts)
    return order, offsets


def group_rows(x: Tensor, order: Tensor, k: int) -> Tensor:
    if not x.is_contiguous():
        return reference.group_rows(x, order, k)
    m, width = order.shape[0], x.shape[1]
    out = x.new_empty((m, width))
    function = _group_rows_long if m * width > _LONG_VALUES else _group_rows
    function(x.data_ptr(), order.data_ptr(), k, out.data_ptr(), m, width * x.element_size())
    return out


def combine_experts(rows: Tensor, order: Tensor, weights: Tensor) -> Tensor:
    long = rows.numel() > _LONG_VALUES
    function = (_combine_long if long else _combine_experts).get(rows.dtype)
    if function is None or not (rows.is_contiguous() and weights.is_contiguous()):
        return reference.combine_experts(rows, order, weights)
    n, k = weights.shape
    out = rows.new_empty((n, rows.shape[1]))
    function(rows.data_ptr(), order.data_ptr(), weights.data_ptr(), out.data_ptr(), n, k, rows.shape[1])
    return out
