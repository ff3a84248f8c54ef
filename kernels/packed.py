"""Linear layers and MoE experts with weights packed once for many calls."""

from __future__ import annotations

import sys
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from moonpool.kernels.cpu.cpu_features import has_amx
from moonpool.kernels.cpu.decoder_layers import LinearStruct, linear_struct
from moonpool.kernels.cpu.library import LINEAR_PAIRS, Function, Library, load
from moonpool.kernels.cpu.memory import weight_memory
from moonpool.kernels.dispatch import grouped_matmul

# A call of more multiply-adds than this (about 50 µs) releases the GIL.
MAX_GIL_HELD_PRODUCTS = 5_000_000
# Rows of a weight that are compared at once: a whole weight may be the largest matrix of a model.
_ROWS = 1024


class PackedWeights:
    """Matrices in the library's layout, one after the other, and the functions that multiply by them."""

    def __init__(self, library: Library, weights: Tensor, operation: str) -> None:
        """weights: [num_matrices, out, in], contiguous; operation: ``linear`` or ``grouped_linear``."""
        dtype, (num_matrices, outs, ins) = weights.dtype, weights.shape
        size = library.gil_held["packed_size"][dtype](ins, outs)
        memory = weight_memory(num_matrices * size * dtype.itemsize)
        self._data = memory.view(dtype).view(num_matrices, size)
        self.address = self._data.data_ptr()
        self.nbytes = self._data.nbytes
        for weight, packed in zip(weights, self._data, strict=True):
            library.gil_released["pack"][dtype](weight.data_ptr(), packed.data_ptr(), ins, outs)
        pairs = [pair for pair in LINEAR_PAIRS if pair[1] is dtype]
        self._gil_held = {pair[0]: library.gil_held[operation][pair] for pair in pairs}
        self._gil_released = {pair[0]: library.gil_released[operation][pair] for pair in pairs}
        self._max_gil_held_rows = MAX_GIL_HELD_PRODUCTS // max(1, ins * outs)

    def function(self, num_rows: int, dtype: torch.dtype) -> Function:
        """The function for so many rows of activations of ``dtype``, the one that was packed for."""
        return (self._gil_held if num_rows <= self._max_gil_held_rows else self._gil_released)[dtype]


class PackedLinear:
    """``y = x @ weight.T + bias``, with the weight packed once for many calls.

    weight: [out, in]; bias: [out] or None. A call with x: [n, in] returns [n, out] in the dtype of x, summed
    in float32. On a CPU with the compiled library only the packed weight is kept. A float32 weight with only
    bfloat16 values (a bf16 checkpoint run in float32) is packed as bfloat16, which changes no result and
    halves the bytes a step reads. The result of a row does not depend on the other rows.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None, dtype: torch.dtype | None = None) -> None:
        """dtype: the dtype to compute with, default the weight's; the weight need not be converted to it."""
        self.out_features, self.in_features = weight.shape
        dtype = dtype or weight.dtype
        self.weight: Tensor | None = None  # [out, in]; None: it is packed
        self._bias = bias
        self._packed: PackedWeights | None = None
        library = load() if weight.device.type == "cpu" else None
        if library is not None and prefers_packed(dtype):
            self._packed = PackedWeights(library, storage(weight, dtype)[None], "linear")
            self.nbytes = self._packed.nbytes
            self._float_bias = None if bias is None else bias.float().contiguous()
            self._bias_address = None if self._float_bias is None else self._float_bias.data_ptr()
        else:
            self.weight = weight.to(dtype)
            self.nbytes = self.weight.nbytes

    def struct(self, dtype: torch.dtype) -> LinearStruct | None:
        """The layer for activations of ``dtype`` as the library has it; None: torch multiplies. Its addresses
        are valid while this object exists."""
        packed = self._packed
        if packed is None:
            return None
        function, sizes = packed.function(sys.maxsize, dtype), (self.in_features, self.out_features)
        return linear_struct(function, packed.address, None, None, self._bias_address, *sizes)

    def __call__(self, x: Tensor) -> Tensor:
        packed, n = self._packed, x.shape[0]
        if packed is None:
            assert self.weight is not None
            bias = None if self._bias is None else self._bias.to(x.dtype)
            return F.linear(x, self.weight.to(x.dtype), bias)
        if not x.is_contiguous():
            x = x.contiguous()
        y = x.new_empty((n, self.out_features))
        packed.function(n, x.dtype)(
            x.data_ptr(), packed.address, self._bias_address, y.data_ptr(),
            n, self.in_features, self.out_features,
        )  # fmt: skip
        return y


class PackedExperts:
    """``y = x @ weights[e].T`` for the rows of each expert e, with the weights packed once for many calls.

    weights: [num_experts, out, in]. A call with x: [m, in] and offsets: int32 [num_experts + 1], as in
    ``grouped_matmul``, returns [m, out] in the dtype of x. On a CPU the weights are packed as in
    ``PackedLinear``; elsewhere they stay plain. One call computes all experts and reads only the weights of
    experts with rows. The result of a row does not depend on the other rows.
    """

    def __init__(self, weights: Tensor, dtype: torch.dtype | None = None) -> None:
        """dtype: as in ``PackedLinear``."""
        self.num_experts, self.out_features, self.in_features = weights.shape
        self._weights: Tensor | None = None
        self._packed: PackedWeights | None = None
        self._experts: list[PackedLinear] = []  # on a CPU, where the torch form is used
        dtype = dtype or weights.dtype
        if weights.device.type != "cpu":
            self._weights = weights.to(dtype)
            return
        library = load()
        if library is not None and prefers_packed(dtype):
            self._packed = PackedWeights(library, storage(weights, dtype), "grouped_linear")
        else:
            self._experts = [PackedLinear(weight, dtype=dtype) for weight in weights.unbind(0)]

    @property
    def nbytes(self) -> int:
        """Bytes of the weights as stored."""
        stored = [one for one in (self._weights, self._packed, *self._experts) if one is not None]
        return sum(one.nbytes for one in stored)

    def __call__(self, x: Tensor, offsets: Tensor) -> Tensor:
        packed, m = self._packed, x.shape[0]
        if packed is None:
            return self._plain(x, offsets)
        if not x.is_contiguous():
            x = x.contiguous()
        y = x.new_empty((m, self.out_features))
        packed.function(m, x.dtype)(
            x.data_ptr(), packed.address, offsets.data_ptr(), y.data_ptr(),
            m, self.num_experts, self.in_features, self.out_features,
        )  # fmt: skip
        return y

    def _plain(self, x: Tensor, offsets: Tensor) -> Tensor:
        if self._weights is not None:
            out: Tensor = grouped_matmul(x, self._weights, offsets)
            return out
        y = x.new_zeros((x.shape[0], self.out_features))
        for expert, (start, end) in enumerate(pairwise(offsets.tolist())):
            if start < end:
                y[start:end] = self._experts[expert](x[start:end])
        return y


def prefers_packed(dtype: torch.dtype) -> bool:
    """Whether the packed form is the faster one, as measured for 1 to 512 rows (docs/decisions/kernels.md).

    It wins or ties at every number of rows, except for bfloat16 where oneDNN uses a matrix unit (AMX).
    """
    if dtype is torch.bfloat16 and has_amx():
        return False
    return dtype in (torch.float32, torch.bfloat16, torch.float16)


def storage(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """``weight`` as it is packed to compute with ``dtype``: contiguous; in bfloat16 for float32 if exact."""
    if dtype is torch.float32 and _is_bfloat16(weight):
        dtype = torch.bfloat16
    return weight.to(dtype).contiguous()


def _is_bfloat16(weight: Tensor) -> bool:
    """Whether every value is exact in bfloat16."""
    if weight.dtype is torch.bfloat16:
        return True
    parts = torch.split(weight.flatten(0, -2), _ROWS)
    return all(torch.equal(part.bfloat16().float(), part.float()) for part in parts)
