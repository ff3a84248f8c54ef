"""Tensors that checkpoints store in another order or in one piece: how each is made from what is stored."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from moonpool.engine.checkpoint.weights import Derived
from moonpool.kernels.reference import QuantisedWeight


def split_rows(source: str, sizes: Mapping[str, int], width: int) -> dict[str, Derived]:
    """The parts of a matrix [sum(sizes), width] of several with the same input (name → rows), in order."""
    stored, tensors, start = {source: (sum(sizes.values()), width)}, {}, 0
    for name, size in sizes.items():
        tensors[name] = Derived(stored, partial(_rows, start=start, count=size))
        start += size
    return tensors


def _rows(whole: Tensor | QuantisedWeight, start: int, count: int) -> Tensor | QuantisedWeight:
    return whole[start : start + count]


def half_split(name: str, shape: tuple[int, ...], head_dim: int, rotary_dim: int) -> Derived:
    """The rows of q or k with the rotated pairs (2 j, 2 j + 1) of each head as (j, rotary_dim / 2 + j).

    q · k stays the same, and kernels rotate only such pairs.
    """
    return Derived({name: shape}, partial(_half_split, head_dim=head_dim, rotary_dim=rotary_dim))


def _half_split(rows: Tensor | QuantisedWeight, head_dim: int, rotary_dim: int) -> Tensor | QuantisedWeight:
    if isinstance(rows, QuantisedWeight):
        order = _half_split(torch.arange(len(rows)), head_dim, rotary_dim)
        assert isinstance(order, Tensor)
        return rows[order]
    heads = rows.reshape(-1, head_dim, *rows.shape[1:]).clone()
    pairs = heads[:, :rotary_dim].reshape(len(heads), rotary_dim // 2, 2, *rows.shape[1:])
    heads[:, :rotary_dim] = pairs.transpose(1, 2).flatten(1, 2)
    return heads.view(rows.shape)


def same(source: str, shape: tuple[int, ...]) -> Derived:
    """A tensor of another name."""
    return Derived({source: shape}, lambda stored: stored)


def from_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return a matrix of 4-bit floats as bfloat16, which is exact.

    blocks: uint8 [rows, groups, 16], of 32 values, the even ones in the low bits; scales: uint8 [rows,
    groups], exponents of two plus 127.
    """
    values = torch.tensor(_FP4, dtype=torch.float32)
    pairs = torch.stack((values[(blocks & 15).long()], values[(blocks >> 4).long()]), dim=-1)
    return torch.ldexp(pairs.flatten(-2), scales.int()[..., None] - 127).flatten(-2).bfloat16()


_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
