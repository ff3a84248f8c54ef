"""The linear layer of a model, in the form that is fastest for its shape, dtype and device."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from moonpool.kernels.cpu.cpu_features import has_amx
from moonpool.kernels.cpu.library import LINEAR_PAIRS, Function, Library, load

# A call of more multiply-adds than this (about 50 µs) gives Python's global lock up.
LONG_PRODUCTS = 5_000_000
_ROWS = 1024


class PackedLinear:
    """``y = x @ weight.T + bias``, with the weight laid out once for many calls.

    weight: [out, in]; bias: [out] or None. Calling it with x: [n, in] gives [n, out] in the dtype of x,
    summed in float32. On a CPU with the compiled library the weight is kept packed, and nothing else of it; a
    float32 weight whose every value is a bfloat16 (a bf16 checkpoint run in float32) is packed as bfloat16,
    which changes no result and halves the bytes a step reads. A row's result does not depend on the other
    rows.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None, dtype: torch.dtype | None = None) -> None:
        """dtype: what the weight is used as, its own unless given: a bfloat16 one need not be widened to be
        used as float32."""
        self.out_features, self.in_features = weight.shape
        self.dtype = dtype or weight.dtype
        self._weight: Tensor | None = None
        self._bias = bias
        # Empty where the plain form runs.
        self._held: dict[torch.dtype, Function] = {}
        self._freed: dict[torch.dtype, Function] = {}
        self._most_held_rows = LONG_PRODUCTS // max(1, self.in_features * self.out_features)
        library = load() if weight.device.type == "cpu" else None
        if library is not None and own_form_is_faster(self.dtype):
            self._pack(library, kept(weight, self.dtype))
        else:
            self._weight = weight.to(self.dtype)

    def _pack(self, library: Library, stored: Tensor) -> None:
        self._packed = torch.empty(
            library.packed_size(stored.dtype, self.in_features, self.out_features), dtype=stored.dtype
        )
        self._library = library
        library.freed["pack"][stored.dtype](
            stored.data_ptr(), self._packed.data_ptr(), self.in_features, self.out_features
        )
        self._packed_address = self._packed.data_ptr()
        self._wide_bias = None if self._bias is None else self._bias.float().contiguous()
        self._bias_address = None if self._wide_bias is None else self._wide_bias.data_ptr()
        for pair in LINEAR_PAIRS:
            if pair[1] is stored.dtype:
                self._held[pair[0]] = library.held["linear"][pair]
                self._freed[pair[0]] = library.freed["linear"][pair]

    @property
    def weight(self) -> Tensor:
        """The plain weight, [out, in], in the dtype it was given; unpacked anew on every call where it is
        packed."""
        if self._weight is not None:
            return self._weight
        plain = torch.empty((self.out_features, self.in_features), dtype=self._packed.dtype)
        self._library.freed["unpack"][plain.dtype](
            self._packed_address, plain.data_ptr(), self.in_features, self.out_features
        )
        return plain.to(self.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes the weight takes as it is kept, which is also what one call reads."""
        kept = self._packed if self._weight is None else self._weight
        return kept.nbytes

    @property
    def form(self) -> str:
        """What runs, for reports: ``torch``, or ``packed`` with the dtype the weight is stored in."""
        return (
            "torch"
            if self._weight is not None
            else f"packed {str(self._packed.dtype).removeprefix('torch.')}"
        )

    def __call__(self, x: Tensor) -> Tensor:
        n = x.shape[0]
        function = (self._held if n <= self._most_held_rows else self._freed).get(x.dtype)
        if function is None:
            bias = None if self._bias is None else self._bias.to(x.dtype)
            return F.linear(x, self.weight.to(x.dtype), bias)
        if not x.is_contiguous():
            x = x.contiguous()
        y = x.new_empty((n, self.out_features))
        function(
            x.data_ptr(),
            self._packed_address,
            self._bias_address,
            y.data_ptr(),
            n,
            self.in_features,
            self.out_features,
        )
        return y


def own_form_is_faster(dtype: torch.dtype) -> bool:
    """Measured for 1 to 512 rows (docs/decisions/kernels.md): the packed form wins or ties at every count,
    but for bfloat16 where oneDNN has a matrix unit to drive. There the weight stays plain."""
    if dtype is torch.bfloat16 and has_amx():
        return False
    return dtype in (torch.float32, torch.bfloat16, torch.float16)


def kept(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """``weight``, to be used as ``dtype``, as it is packed: contiguous; bfloat16 for float32 where it is
    exact."""
    if dtype is torch.float32 and _is_bfloat16(weight):
        dtype = torch.bfloat16
    return weight.to(dtype).contiguous()


def _is_bfloat16(weight: Tensor) -> bool:
    """Whether every value is one. Some rows at a time: it may be the largest matrix of a model."""
    if weight.dtype is torch.bfloat16:
        return True
    parts = torch.split(weight.flatten(0, -2), _ROWS)
    return all(torch.equal(part.bfloat16().float(), part.float()) for part in parts)
