"""Rows of adapters anywhere in memory, as in the pool's blocks."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from moonpool.kernels.reference import LINE_NBYTES


def scattered(a: Tensor, b: Tensor, *, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return ``weights`` and ``lines`` of ``add_lora`` with these rows in any order, NaN between them.

    a: [rows, in]; b: [rows, out].
    """
    line = LINE_NBYTES // a.itemsize
    rows = [(row, side) for side in (0, 1) for row in range(len(a))]
    random.Random(seed).shuffle(rows)
    lines, end = torch.zeros((len(a), 2), dtype=torch.int32, device=a.device), 1
    for row, side in rows:
        lines[row, side] = end
        end += -(-(a, b)[side].shape[1] // line) + row % 2
    weights = torch.full((end * line,), torch.nan, dtype=a.dtype, device=a.device)
    for row, side in rows:
        values = (a, b)[side][row]
        begin = int(lines[row, side]) * line
        weights[begin : begin + len(values)] = values
    return weights, lines
