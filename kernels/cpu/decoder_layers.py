"""The layers of a dense decoder as one call, for tokens that decode."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moonpool.kernels.cpu.library import Function, Library, view_of

_P, _I, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float

# Steps of fewer multiply-adds and bytes of KV hold the GIL, as their operations would one by one: half a
# millisecond for either.
_MAX_GIL_HELD_PRODUCTS = 50_000_000
_MAX_GIL_HELD_NBYTES = 8 << 20


Dtypes = tuple[torch.dtype, torch.dtype]


class LinearStruct(ctypes.Structure):
    """``struct Linear`` of layers.cpp."""

    _fields_ = [
        ("function", _P),
        ("weight", _P),
        ("scales", _P),
        ("zeros", _P),
        ("bias", _P),
        ("inputs", _I),
        ("outputs", _I),
        ("group", _I),
    ]


def linear_struct(
    function: Function,
    weight: int,
    scales: int | None,
    zeros: int | None,
    bias: int | None,
    inputs: int,
    outputs: int,
    group: int = 0,
) -> LinearStruct:
    """The library's ``function``, its weight and what belongs to it, by address. scales: None: plain."""
    address = ctypes.cast(function, _P).value  # type: ignore[arg-type]
    return LinearStruct(address, weight, scales, zeros, bias, inputs, outputs, group)


class _Layer(ctypes.Structure):
    _fields_ = [
        *((name, _P) for name in ("attention_in", "q_norm", "k_norm", "mlp_in", "cos", "sin")),
        *((name, _I) for name in ("half", "window")),
        *((name, _F) for name in ("scale", "v_scale", "k_factor", "v_factor")),
        *((name, LinearStruct) for name in ("qkv", "o", "gate_up", "down")),
    ]


class _Step(ctypes.Structure):
    _fields_ = [
        *((name, _P) for name in ("pool", "positions", "slots", "tables", "contexts")),
        *((name, _I) for name in ("table_stride", "batch", "num_heads")),
        *((name, _F) for name in ("soft_cap", "eps")),
    ]


@dataclass(frozen=True, slots=True)
class DecoderRules:
    """What all layers share. num_heads: of queries. soft_cap: of scores; 0: none. eps: of norms."""

    num_heads: int
    soft_cap: float
    eps: float


@dataclass(frozen=True, slots=True)
class LayerTensors:
    """A layer of a decoder: norm → qkv → attention → o → norm → gate_up → SiLU → down.

    cos, sin: float32 [positions, rotated / 2]. scale: of the scores. k_scale, v_scale: of float8 pages,
    else 1. The linears are those of ``struct`` of ``PackedLinear`` or ``QuantisedLinear``, which must
    outlive this.
    """

    attention_in: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None
    mlp_in: Tensor
    cos: Tensor
    sin: Tensor
    window: int
    scale: float
    k_scale: float
    v_scale: float
    qkv: LinearStruct
    o: LinearStruct
    gate_up: LinearStruct
    down: LinearStruct

    def struct(self) -> _Layer:
        norms = (self.attention_in, self.q_norm, self.k_norm, self.mlp_in)
        return _Layer(
            *(None if norm is None else norm.data_ptr() for norm in norms),
            self.cos.data_ptr(),
            self.sin.data_ptr(),
            self.cos.shape[1],
            self.window,
            self.scale * self.k_scale,
            self.v_scale,
            1 / self.k_scale,
            1 / self.v_scale,
            self.qkv,
            self.o,
            self.gate_up,
            self.down,
        )


class DecoderLayers:
    """Layers with activations of one dtype over pools of one dtype."""

    def __init__(
        self, library: Library, dtypes: Dtypes, layers: Sequence[LayerTensors], rules: DecoderRules
    ) -> None:
        """dtypes: a key of ``POOL_PAIRS``."""
        self._gil_held = library.gil_held["decode_layers"][dtypes]
        self._gil_released = library.gil_released["decode_layers"][dtypes]
        self._tensors = layers  # the structs have their addresses
        self._layers = (_Layer * len(layers))(*(layer.struct() for layer in layers))
        self._rules = rules
        linears = [linear for of in layers for linear in (of.qkv, of.o, of.gate_up, of.down)]
        num_products = sum(linear.inputs * linear.outputs for linear in linears)
        self._max_gil_held_rows = _MAX_GIL_HELD_PRODUCTS // num_products

    def __call__(
        self, hidden: Tensor, pool: Tensor, positions: Tensor, slots: Tensor, table: Tensor, lens: Tensor
    ) -> Tensor:
        """Write the tokens' KV to ``pool`` and overwrite ``hidden`` with the last layer's output. Return the
        residual, which is still to be added to that.

        hidden: [batch, hidden], contiguous; positions, slots: int64 [batch]; table: int32 [batch,
        max_blocks]; lens: int32 [batch].
        """
        residual, view = torch.empty_like(hidden), view_of(pool)
        n, rules = len(hidden), self._rules
        step = _Step(
            view.address, positions.data_ptr(), slots.data_ptr(), table.data_ptr(), lens.data_ptr(),
            table.stride(0), n, rules.num_heads, rules.soft_cap, rules.eps,
        )  # fmt: skip
        is_long = table.numel() * view.block_nbytes * len(self._layers) > _MAX_GIL_HELD_NBYTES
        function = self._gil_released if is_long or n > self._max_gil_held_rows else self._gil_held
        function(
            ctypes.addressof(self._layers), len(self._layers), ctypes.addressof(step),
            hidden.data_ptr(), residual.data_ptr(),
        )  # fmt: skip
        return residual
