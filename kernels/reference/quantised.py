"""Weights in few bits: what they mean, how they are made and cut, and their product in plain torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import Literal

import torch
from torch import Tensor

from moonpool.kernels.reference.dtypes import FP8

Kind = Literal["int8", "int4", "fp8"]
#: The code of 0 where no zeros are stored.
MIDDLE = {"int8": 128, "int4": 8, "fp8": 0}
#: Fast forms store the inputs of a group in eights.
GROUP_UNIT = 8
# Inputs with 4-bit codes in common bytes: code j is in the low bits of byte j, code 16 + j in its high bits.
_NIBBLE_RUN = 32


@dataclass(frozen=True, slots=True)
class QuantisedWeight:
    """A matrix [out, in]: scale × (code − zero), with a scale for each output and group of inputs.

    codes: uint8 [out, in], one a byte for 4 bits too; of ``fp8`` the bytes of float8_e4m3fn. scales: float32
    [out, groups]. zeros: int16 [out, groups]; None: ``MIDDLE``. group: inputs of a group, the last may be
    shorter. order: int64 [in], column j is multiplied with input order[j]; None: with input j.
    """

    kind: Kind
    codes: Tensor
    scales: Tensor
    group: int
    zeros: Tensor | None = None
    order: Tensor | None = None

    @classmethod
    def of(cls, weight: Tensor, kind: Literal["int8", "int4"], group: int = 0) -> QuantisedWeight:
        """``weight`` [out, in] rounded to nearest. ``group``: 0: one scale for an output.

        The value of the largest magnitude in a group is exact up to the scale's rounding. No error is larger
        than half a scale, or, with 4 bits, than a scale for values opposite to the largest.
        """
        outs, ins = weight.shape
        group = min(group or ins, ins)
        padded = torch.nn.functional.pad(weight.float(), (0, -ins % group)).view(outs, -1, group)
        if kind == "int8":
            scales = padded.abs().amax(-1) / 127
        else:
            low, high = padded.amin(-1), padded.amax(-1)
            scales = torch.where(-low >= high, low, high) / -8  # 16 codes: one more on the larger side
        steps = torch.where(scales == 0, 1.0, scales)[..., None]
        most = 2 * MIDDLE[kind] - 1
        codes = padded.div_(steps).round_().add_(MIDDLE[kind]).clamp_(0, most).to(torch.uint8)
        return cls(kind, codes.view(outs, -1)[:, :ins].contiguous(), scales, group)

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    def __len__(self) -> int:
        return len(self.codes)

    def __getitem__(self, part: slice | Tensor | tuple[slice, ...]) -> QuantisedWeight | Tensor:
        """Rows, or rows and columns. A plain float32 matrix where the columns begin within a group, or would
        be in another order."""
        rows, columns = part if isinstance(part, tuple) and len(part) > 1 else (part, slice(None))
        rows = rows[0] if isinstance(rows, tuple) and rows else slice(None) if rows == () else rows
        cut = replace(
            self,
            codes=self.codes[rows],
            scales=self.scales[rows],
            zeros=None if self.zeros is None else self.zeros[rows],
        )
        start, stop, _ = columns.indices(self.shape[1])
        if stop - start == self.shape[1]:
            return cut
        group = stop - start if start // self.group == (stop - 1) // self.group else gcd(self.group, start)
        if self.order is not None or (group < stop - start and group % GROUP_UNIT):
            return cut.dequantised()[:, start:stop]
        which = torch.arange(start, stop, group) // self.group
        return replace(
            cut,
            codes=cut.codes[:, start:stop],
            scales=cut.scales[:, which],
            zeros=None if cut.zeros is None else cut.zeros[:, which],
            group=group,
        )

    @classmethod
    def joined(cls, parts: Sequence[QuantisedWeight]) -> QuantisedWeight | None:
        """The rows of all parts as one matrix; None where kinds, groups or orders differ."""
        first = parts[0]
        for part in parts[1:]:
            same_order = (
                first.order is part.order
                if first.order is None or part.order is None
                else torch.equal(first.order, part.order)
            )
            if (part.kind, part.group, part.shape[1]) != (first.kind, first.group, first.shape[1]):
                return None
            if not same_order:
                return None
        zeros = None
        if any(part.zeros is not None for part in parts):
            zeros = torch.cat([part._all_zeros() for part in parts])
        codes, scales = torch.cat([part.codes for part in parts]), torch.cat([part.scales for part in parts])
        return replace(first, codes=codes, scales=scales, zeros=zeros)

    def _all_zeros(self) -> Tensor:
        if self.zeros is not None:
            return self.zeros
        return torch.full(self.scales.shape, MIDDLE[self.kind], dtype=torch.int16)

    def dequantised(self) -> Tensor:
        """The matrix in float32, [out, in], columns in the order of the inputs."""
        values = _scaled(self.codes, self.scales, self.zeros, self.kind, self.group)
        if self.order is None:
            return values
        plain = torch.empty_like(values)
        plain[:, self.order] = values
        return plain


def _scaled(codes: Tensor, scales: Tensor, zeros: Tensor | None, kind: Kind, group: int) -> Tensor:
    ins = codes.shape[1]
    values = codes.view(FP8).float() if kind == "fp8" else codes.float()
    if zeros is None:
        values -= MIDDLE[kind]
    else:
        values -= zeros.float().repeat_interleave(group, 1)[:, :ins]
    return values.mul_(scales.repeat_interleave(group, 1)[:, :ins])


def pack_nibbles(codes: Tensor) -> Tensor:
    """uint8 [out, in] of 4-bit codes → uint8 [out, 16 × runs of 32 inputs]."""
    padded = torch.nn.functional.pad(codes, (0, -codes.shape[1] % _NIBBLE_RUN))
    runs = padded.view(len(codes), -1, 2, _NIBBLE_RUN // 2)
    return (runs[:, :, 0] | runs[:, :, 1] << 4).flatten(1)


def unpack_nibbles(packed: Tensor, ins: int) -> Tensor:
    """The inverse of ``pack_nibbles``: uint8 [out, ins]."""
    runs = packed.view(len(packed), -1, 1, _NIBBLE_RUN // 2)
    return torch.cat((runs & 15, runs >> 4), 2).flatten(1)[:, :ins]


def quantised_matmul(
    x: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor | None, *, kind: Kind, group: int
) -> Tensor:
    """x @ W.T for x [n, in]: [n, out] in the dtype of x.

    codes: uint8 [out, in], of ``int4`` as ``pack_nibbles`` returns them; the others as in QuantisedWeight.
    """
    plain = unpack_nibbles(codes, x.shape[1]) if kind == "int4" else codes
    wide = x.double() if x.dtype is torch.float64 else x.float()
    weight = _scaled(plain, scales, zeros, kind, group).to(wide.dtype)
    return (wide @ weight.T).to(x.dtype)
