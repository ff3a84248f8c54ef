"""The linear layer of a model, in the form that is fastest for its shape, dtype and device."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


class PackedLinear:
    """``y = x @ weight.T + bias``, with the weight laid out once for many calls.

    weight: [out, in]; bias: [out] or None. Calling it with x: [n, in] gives [n, out] in the dtype of x.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._weight = weight
        self._bias = bias
        self.out_features, self.in_features = weight.shape

    @property
    def weight(self) -> Tensor:
        """The plain weight, [out, in]."""
        return self._weight

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self._weight, self._bias)
