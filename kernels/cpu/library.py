"""The compiled library, bound through ctypes: one function an operation and dtype, taking raw addresses.

Every function is bound twice. ``held`` keeps Python's global lock during the call, which is right for work of
microseconds: giving the lock up there costs a hand-over to whichever thread waits for it. ``freed`` gives it
up, which is right for anything long enough that the event loop would notice.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moonpool.kernels.cpu.build import KERNELS
from moonpool.kernels.mode import mode
from moonpool.runtime.machine.compiled_library import BuildFailed

log = logging.getLogger(__name__)

DTYPE_NAMES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}
# (activations, weights) the library multiplies.
LINEAR_PAIRS = {
    (torch.float32, torch.float32): "f32_f32",
    (torch.float32, torch.bfloat16): "f32_bf16",
    (torch.float32, torch.float16): "f32_f16",
    (torch.bfloat16, torch.bfloat16): "bf16_bf16",
    (torch.float16, torch.float16): "f16_f16",
}

# (activations, pool).
POOL_PAIRS = {
    **{(dtype, dtype): f"{name}_{name}" for dtype, name in DTYPE_NAMES.items()},
    **{(dtype, torch.float8_e4m3fn): f"{name}_f8" for dtype, name in DTYPE_NAMES.items()},
}

_P, _I, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
_SIGNATURES: dict[str, list[Any]] = {
    "rms_norm": [_P, _P, _P, _P, _P, _I, _I, _F],
    "silu_mul": [_P, _P, _I, _I],
    "argmax_rows": [_P, _P, _I, _I],
    "merge": [_P, _P, _P, _P, _I, _I, _I],
    "pack": [_P, _P, _I, _I],
    "unpack": [_P, _P, _I, _I],
    "route_experts": [_P, _P, _P, _I, _I, _I, _I],
    "combine_experts": [_P, _P, _P, _P, _I, _I, _I],
}
# Operations on bytes or indices.
_PLAIN_SIGNATURES: dict[str, list[Any]] = {
    "group_by_expert": [_P, _P, _P, _I, _I],
    "group_rows": [_P, _P, _I, _P, _I, _I],
}
# Operations on a pool, whose dtype need not be that of the activations.
_POOL_SIGNATURES: dict[str, list[Any]] = {
    "write_kv": [_P, _P, _P, _I, _P, _I, _F, _F],
    "rotate_and_write": [_P, _P, _P, _P, _I, _P, _I, _P, _P, _I, _I, _P, _P, _F, _F, _F],
    "decode": [_P, _I, _P, _P, _P, _P, _I, _P, _P, _I, _I, _F, _F, _I, _F],
    "prefill": [_P, _I, _P, _P, _P, _P, _I, _P, _P, _P, _I, _I, _F, _F, _I, _F],
}
_LINEAR_SIGNATURES: dict[str, list[Any]] = {
    "linear": [_P, _P, _P, _P, _I, _I, _I],
    "grouped_linear": [_P, _P, _P, _P, _I, _I, _I, _I],
}

Function = Callable[..., Any]


class PoolStruct(ctypes.Structure):
    """``struct Pool`` of pool.h; strides in elements."""

    _fields_ = [
        ("data", _P),
        ("num_kv_heads", _I),
        ("block_size", _I),
        ("head_dim", _I),
        ("block_stride", _I),
        ("layer_stride", _I),
        ("kv_stride", _I),
        ("head_stride", _I),
    ]


class PoolView:
    """A pool tensor as the library takes it. ``address`` is that of the struct, valid while the view
    lives."""

    __slots__ = ("address", "block_nbytes", "dtype", "struct")

    def __init__(self, pool: Tensor) -> None:
        strides = pool.stride()
        if pool.dim() != 6 or strides[5] != 1 or strides[4] != pool.shape[5]:
            raise ValueError(f"a pool has six dimensions, the last two contiguous; got strides {strides}")
        self.dtype = pool.dtype
        # Of one block and layer.
        self.block_nbytes = 2 * pool.shape[3] * pool.shape[4] * pool.shape[5] * pool.element_size()
        self.struct = PoolStruct(pool.data_ptr(), pool.shape[3], pool.shape[4], pool.shape[5], *strides[:4])
        self.address = ctypes.addressof(self.struct)


def view_of(pool: Tensor) -> PoolView:
    """The pool's view, made once and kept on the tensor itself, so that it lives exactly as long."""
    try:
        view: PoolView = pool._moonpool_view  # type: ignore[attr-defined]
    except AttributeError:
        view = PoolView(pool)
        pool._moonpool_view = view  # type: ignore[attr-defined]
    return view


class Library:
    """Functions by dtype: ``held.rms_norm[torch.float32](...)``."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.held = _bind(ctypes.PyDLL(str(path)))
        self.freed = _bind(ctypes.CDLL(str(path)))

    def packed_size(self, dtype: torch.dtype, in_features: int, out_features: int) -> int:
        """Elements the packed form of a weight takes."""
        return int(self.freed["packed_size"][dtype](in_features, out_features))


def _bind(loaded: ctypes.CDLL) -> dict[str, dict[Any, Function]]:
    table: dict[str, dict[Any, Function]] = {}
    for name, arguments in _SIGNATURES.items():
        table[name] = {}
        for dtype, suffix in DTYPE_NAMES.items():
            function = getattr(loaded, f"{name}_{suffix}")
            function.argtypes, function.restype = arguments, None
            table[name][dtype] = function
    for name, arguments in _POOL_SIGNATURES.items():
        table[name] = {}
        for pair, suffix in POOL_PAIRS.items():
            function = getattr(loaded, f"{name}_{suffix}")
            function.argtypes, function.restype = arguments, None
            table[name][pair] = function
    for name, arguments in _LINEAR_SIGNATURES.items():
        table[name] = {}
        for pair, suffix in LINEAR_PAIRS.items():
            function = getattr(loaded, f"{name}_{suffix}")
            function.argtypes, function.restype = arguments, None
            table[name][pair] = function
    for name, arguments in _PLAIN_SIGNATURES.items():
        function = getattr(loaded, name)
        function.argtypes, function.restype = arguments, None
        table[name] = {None: function}
    table["packed_size"] = {}
    for dtype, suffix in DTYPE_NAMES.items():
        function = getattr(loaded, f"packed_size_{suffix}")
        function.argtypes, function.restype = [_I, _I], _I
        table["packed_size"][dtype] = function
    return table


@cache
def _loaded() -> tuple[Library | None, str]:
    if mode() == "torch":
        return None, "MOONPOOL_KERNELS=torch asks for the plain forms"
    try:
        return Library(KERNELS.build()), ""
    except (BuildFailed, OSError) as error:
        log.warning("%s", error)
        return None, str(error)


def load() -> Library | None:
    """The library, compiled first if need be; None where that is impossible (said once in the log) or where
    ``MOONPOOL_KERNELS=torch`` asks for the plain forms."""
    return _loaded()[0]


def why_not() -> str:
    """Why ``load`` gives None; empty where it does not."""
    return _loaded()[1]
