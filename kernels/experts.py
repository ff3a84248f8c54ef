"""The matrices of a layer's experts, in the form that is fastest for their dtype and device."""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor

from kernels.dispatch import grouped_matmul
from kernels.linear import PackedLinear


class PackedExperts:
    """``y = x @ weights[e].T`` for the rows of each expert e, with the weights laid out once for many calls.

    weights: [num_experts, out, in]. Calling it with x: [m, in] and offsets: int32 [num_experts + 1], as
    ``grouped_matmul`` takes them, gives [m, out] in the dtype of x. On a CPU each expert is a
    ``PackedLinear``; elsewhere one call does all. A row's result does not depend on the other rows.
    """

    def __init__(self, weights: Tensor) -> None:
        self.num_experts, self.out_features, self.in_features = weights.shape
        self._weights: Tensor | None = weights
        self._experts: list[PackedLinear] = []
        if weights.device.type == "cpu":
            self._experts = [PackedLinear(weight) for weight in weights.unbind(0)]
            self._weights = None

    @property
    def nbytes(self) -> int:
        """Bytes the weights take as they are kept."""
        if self._weights is not None:
            return self._weights.nbytes
        return sum(expert.nbytes for expert in self._experts)

    def __call__(self, x: Tensor, offsets: Tensor) -> Tensor:
        if self._weights is not None:
            out: Tensor = grouped_matmul(x, self._weights, offsets)
            return out
        y = x.new_zeros((x.shape[0], self.out_features))
        for expert, (start, end) in enumerate(pairwise(offsets.tolist())):
            if start < end:
                y[start:end] = self._experts[expert](x[start:end])
        return y
