"""Linear layers and MoE experts with weights in few bits."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from moonpool.kernels import dispatch
from moonpool.kernels.cpu.decoder_layers import LinearStruct, linear_struct
from moonpool.kernels.cpu.library import DTYPE_NAMES, Library, load
from moonpool.kernels.cpu.memory import weight_memory
from moonpool.kernels.packed import MAX_GIL_HELD_PRODUCTS, PackedLinear
from moonpool.kernels.reference.quantised import GROUP_UNIT, QuantisedWeight, pack_nibbles

# A kernel's tile of inputs is in one group of at least so many.
_GPU_GROUP = 32


class Linear(Protocol):
    """x: [n, in] → [n, out] in the dtype of x. The result of a row does not depend on the other rows."""

    @property
    def nbytes(self) -> int:
        """Bytes of the weight as stored, which is also what one call reads."""
        ...

    def __call__(self, x: Tensor) -> Tensor: ...


class QuantisedLinear:
    """``y = x @ weight.T + bias`` with a weight in few bits. bias: [out] or None.

    The error is that of rounding x. With the compiled library and integer codes x is rounded to 16-bit
    integers, a scale for each 128 inputs at most: no product of a row is wrong by more than 2^-16 × the
    largest |x| of its segment × |weight|. With float8 codes x is not rounded. On a GPU, and in torch, x is
    multiplied in its dtype.
    """

    def __init__(self, weight: QuantisedWeight, bias: Tensor | None = None, device: str = "cpu") -> None:
        self.out_features, self.in_features = weight.shape
        self.kind, self._group = weight.kind, weight.group
        self._order = None if weight.order is None else weight.order.to(device)
        self._bias = bias
        library = load() if device == "cpu" else None
        fits = weight.group >= self.in_features or weight.group % GROUP_UNIT == 0
        self._library = library if fits else None
        if self._library is not None:
            self._pack(self._library, weight)
            return
        codes = pack_nibbles(weight.codes) if weight.kind == "int4" else weight.codes.contiguous()
        self._codes, self._scales = codes.to(device), weight.scales.contiguous().to(device)
        self._zeros = None if weight.zeros is None else weight.zeros.contiguous().to(device)

    def _pack(self, library: Library, weight: QuantisedWeight) -> None:
        size = library.gil_held["packed_size"][self.kind](self.in_features, self.out_features)
        self._codes = weight_memory(size)
        codes = weight.codes.contiguous()
        library.gil_released["pack"][self.kind](
            codes.data_ptr(), self._codes.data_ptr(), self.in_features, self.out_features
        )
        width = library.gil_held["vector_width"][None]()
        self._scales = _by_panel(weight.scales, width)
        self._zeros = None if weight.zeros is None else _by_panel(weight.zeros, width)
        self._float_bias = None if self._bias is None else self._bias.float().contiguous()
        self._addresses = (
            self._codes.data_ptr(),
            self._scales.data_ptr(),
            None if self._zeros is None else self._zeros.data_ptr(),
            None if self._float_bias is None else self._float_bias.data_ptr(),
        )
        names = {dtype: (dtype, self.kind) for dtype in DTYPE_NAMES}
        self._gil_held = {dtype: library.gil_held["quantised_linear"][of] for dtype, of in names.items()}
        self._gil_released = {
            dtype: library.gil_released["quantised_linear"][of] for dtype, of in names.items()
        }
        self._max_gil_held_rows = MAX_GIL_HELD_PRODUCTS // max(1, self.in_features * self.out_features)

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and zeros, which one call reads."""
        return self._codes.nbytes + self._scales.nbytes + (0 if self._zeros is None else self._zeros.nbytes)

    def struct(self, dtype: torch.dtype) -> LinearStruct | None:
        """As ``PackedLinear.struct``."""
        if self._library is None or self._order is not None:
            return None
        function = self._gil_released[dtype]
        return linear_struct(function, *self._addresses, self.in_features, self.out_features, self._group)

    def __call__(self, x: Tensor) -> Tensor:
        if self._order is not None:
            x = x.index_select(1, self._order)
        if self._library is None:
            y = dispatch.quantised_matmul(
                x, self._codes, self._scales, self._zeros, kind=self.kind, group=self._group
            )
            return y if self._bias is None else y.add_(self._bias)
        n = x.shape[0]
        function = (self._gil_held if n <= self._max_gil_held_rows else self._gil_released)[x.dtype]
        if not x.is_contiguous():
            x = x.contiguous()
        y = x.new_empty((n, self.out_features))
        codes, scales, zeros, bias = self._addresses
        function(
            x.data_ptr(), codes, scales, zeros, bias, y.data_ptr(),
            n, self.in_features, self.out_features, self._group,
        )  # fmt: skip
        return y


def _by_panel(values: Tensor, width: int) -> Tensor:
    """[out, groups] → panels of 4 × ``width`` outputs, each [groups, outputs], padded to a vector."""
    padded = torch.nn.functional.pad(values, (0, 0, 0, -len(values) % width))
    return torch.cat([panel.T.flatten() for panel in torch.split(padded, 4 * width)])


class SeparateLinears:
    """Layers with the same input and weights that cannot be one matrix: their results side by side."""

    def __init__(self, linears: Sequence[Linear]) -> None:
        self._linears = linears

    @property
    def nbytes(self) -> int:
        return sum(linear.nbytes for linear in self._linears)

    def __call__(self, x: Tensor) -> Tensor:
        return torch.cat([linear(x) for linear in self._linears], dim=1)


def linear_of(
    parts: Sequence[Tensor | QuantisedWeight], bias: Tensor | None, dtype: torch.dtype, device: torch.device
) -> Linear:
    """One layer of the rows of all parts, computed in ``dtype`` on ``device``. bias: [out of all] or None."""
    quantised = [part for part in parts if isinstance(part, QuantisedWeight)]
    whole = QuantisedWeight.joined(quantised) if len(quantised) == len(parts) else None
    if whole is not None and _runs_on(whole, device):
        return QuantisedLinear(whole, bias, str(device))
    if len(parts) == 1:
        plain = parts[0] if isinstance(parts[0], Tensor) else parts[0].dequantised()
        return PackedLinear(plain.to(device), bias, dtype)
    biases: list[Tensor | None] = [None] * len(parts)
    if bias is not None:
        biases = list(torch.split(bias, [len(part) for part in parts]))
    return SeparateLinears(
        [linear_of([part], of, dtype, device) for part, of in zip(parts, biases, strict=True)]
    )


def _runs_on(weight: QuantisedWeight, device: torch.device) -> bool:
    """Whether there is a kernel for its groups."""
    fits = weight.group >= weight.shape[1] or weight.group % _GPU_GROUP == 0
    return fits or device.type == "cpu"


class QuantisedExperts:
    """``y = x @ weights[e].T`` for the rows of each expert e, as ``PackedExperts``: one call an expert."""

    def __init__(self, experts: Sequence[Linear]) -> None:
        self._experts = experts

    @property
    def nbytes(self) -> int:
        """Bytes of all experts' weights."""
        return sum(expert.nbytes for expert in self._experts)

    def __call__(self, x: Tensor, offsets: Tensor) -> Tensor:
        parts = [
            expert(x[start:end])
            for expert, (start, end) in zip(self._experts, pairwise(offsets.tolist()), strict=True)
        ]
        y = torch.cat(parts)
        return torch.nn.functional.pad(y, (0, 0, 0, len(x) - len(y)))
