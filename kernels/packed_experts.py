"""The matrices of a layer's experts, in the form that is fastest for their dtype and device."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from moonpool.kernels.cpu.library import LINEAR_PAIRS, Function, Library, load
from moonpool.kernels.dispatch import grouped_matmul
from moonpool.kernels.packed_linear import LONG_PRODUCTS, PackedLinear, kept, own_form_is_faster


class PackedExperts:
    """``y = x @ weights[e].T`` for the rows of each expert e, with the weights laid out once for many calls.

    weights: [num_experts, out, in]. Calling it with x: [m, in] and offsets: int32 [num_experts + 1], as
    ``grouped_matmul`` takes them, gives [m, out] in the dtype of x. On a CPU the weights are kept as those of
    ``PackedLinear``, one expert after the other; elsewhere they stay as they are. One call does all experts,
    and reads the weights of those only that have rows. A row's result does not depend on the other rows.
    """

    def __init__(self, weights: Tensor, dtype: torch.dtype | None = None) -> None:
        """dtype: as of ``PackedLinear``."""
        self.num_experts, self.out_features, self.in_features = weights.shape
        self._weights: Tensor | None = weights
        self._experts: list[PackedLinear] = []  # on a CPU without a form of our own
        self._held: dict[torch.dtype, Function] = {}
        self._freed: dict[torch.dtype, Function] = {}
        self._most_held_rows = LONG_PRODUCTS // max(1, self.in_features * self.out_features)
        dtype = dtype or weights.dtype
        if weights.device.type != "cpu":
            self._weights = weights.to(dtype)
            return
        library = load()
        if library is not None and own_form_is_faster(dtype):
            self._pack(library, kept(weights, dtype))
        else:
            self._experts = [PackedLinear(weight, dtype=dtype) for weight in weights.unbind(0)]
        self._weights = None

    def _pack(self, library: Library, stored: Tensor) -> None:
        size = library.packed_size(stored.dtype, self.in_features, self.out_features)
        self._packed = torch.empty((self.num_experts, size), dtype=stored.dtype)
        self._library = library
        pack = library.freed["pack"][stored.dtype]
        for weight, packed in zip(stored, self._packed, strict=True):
            pack(weight.data_ptr(), packed.data_ptr(), self.in_features, self.out_features)
        self._packed_address = self._packed.data_ptr()
        for pair in LINEAR_PAIRS:
            if pair[1] is stored.dtype:
                self._held[pair[0]] = library.held["grouped_linear"][pair]
                self._freed[pair[0]] = library.freed["grouped_linear"][pair]

    @property
    def nbytes(self) -> int:
        """Bytes the weights take as they are kept."""
        if self._experts:
            return sum(expert.nbytes for expert in self._experts)
        return (self._packed if self._weights is None else self._weights).nbytes

    def __call__(self, x: Tensor, offsets: Tensor) -> Tensor:
        m = x.shape[0]
        function = (self._held if m <= self._most_held_rows else self._freed).get(x.dtype)
        if function is None:
            return self._plain(x, offsets)
        if not x.is_contiguous():
            x = x.contiguous()
        y = x.new_empty((m, self.out_features))
        function(
            x.data_ptr(),
            self._packed_address,
            offsets.data_ptr(),
            y.data_ptr(),
            m,
            self.num_experts,
            self.in_features,
            self.out_features,
        )
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
