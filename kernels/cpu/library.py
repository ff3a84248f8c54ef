"""The compiled library, bound through ctypes: one function for each operation and dtype, on raw addresses.

Every function is bound twice. ``gil_held`` keeps Python's GIL during the call, which suits work of
microseconds: to release it costs a hand-over to any thread that waits for it. ``gil_released`` releases it,
which suits calls that would delay the event loop.
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
from moonpool.kernels.reference.dtypes import head_dim_of
from moonpool.runtime.machine.compiled_library import BuildFailed

log = logging.getLogger(__name__)

DTYPE_NAMES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}
# (activations, weights) of the linear layers.
LINEAR_PAIRS = {
    (torch.float32, torch.float32): "f32_f32",
    (torch.float32, torch.bfloat16): "f32_bf16",
    (torch.bfloat16, torch.bfloat16): "bf16_bf16",
    (torch.float16, torch.float16): "f16_f16",
}
# (activations, pool).
POOL_PAIRS = {
    **{(dtype, dtype): f"{name}_{name}" for dtype, name in DTYPE_NAMES.items()},
    **{(dtype, torch.float8_e4m3fn): f"{name}_f8" for dtype, name in DTYPE_NAMES.items()},
    **{(dtype, torch.int8): f"{name}_i8" for dtype, name in DTYPE_NAMES.items()},
}
# Weights in few bits, by name.
KINDS = {"int8": "int8", "int4": "int4", "fp8": "fp8"}
QUANTISED_PAIRS = {(dtype, kind): f"{name}_{kind}" for dtype, name in DTYPE_NAMES.items() for kind in KINDS}
_UNTYPED = {None: ""}

_P, _I, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
# Name -> the dtypes it exists for, with the suffixes of their symbols, and the types of its arguments.
_FUNCTIONS: dict[str, tuple[dict[Any, str], list[Any]]] = {
    "rms_norm": (DTYPE_NAMES, [_P, _P, _P, _P, _P, _I, _I, _F]),
    "silu_mul": (DTYPE_NAMES, [_P, _P, _I, _I]),
    "argmax_rows": (DTYPE_NAMES, [_P, _P, _I, _I]),
    "forbid_tokens": (_UNTYPED, [_P, _P, _I, _I]),
    "merge": (DTYPE_NAMES, [_P, _P, _P, _P, _I, _I, _I]),
    "pack": ({**DTYPE_NAMES, **KINDS}, [_P, _P, _I, _I]),
    "packed_size": ({**DTYPE_NAMES, **KINDS}, [_I, _I]),
    "route_experts": (DTYPE_NAMES, [_P, _P, _P, _I, _I, _I, _I]),
    "combine_experts": (DTYPE_NAMES, [_P, _P, _P, _P, _I, _I, _I]),
    "group_by_expert": (_UNTYPED, [_P, _P, _P, _I, _I]),
    "group_rows": (_UNTYPED, [_P, _P, _I, _P, _I, _I]),
    "write_kv": (POOL_PAIRS, [_P, _P, _P, _I, _P, _I, _F, _F]),
    "rotate_and_write": (POOL_PAIRS, [_P, _P, _P, _P, _I, _P, _I, _P, _P, _I, _I, _P, _P, _F, _F, _F]),
    "decode": (POOL_PAIRS, [_P, _I, _P, _P, _P, _P, _I, _P, _P, _P, _I, _I, _I, _F, _F, _I, _F]),
    "prefill": (POOL_PAIRS, [_P, _I, _P, _P, _P, _P, _I, _P, _P, _P, _I, _I, _F, _F, _I, _F]),
    "decode_layers": (POOL_PAIRS, [_P, _I, _P, _P, _P]),
    "linear": (LINEAR_PAIRS, [_P, _P, _P, _P, _I, _I, _I]),
    "grouped_linear": (LINEAR_PAIRS, [_P, _P, _P, _P, _I, _I, _I, _I]),
    "quantised_linear": (QUANTISED_PAIRS, [_P, _P, _P, _P, _P, _P, _I, _I, _I, _I]),
    "add_lora": (DTYPE_NAMES, [_P, _I, _P, _P, _P, _P, _P, _I, _I, _I, _I]),
    "vector_width": (_UNTYPED, []),
    "multiply_registers": (_UNTYPED, [_P, _I]),
    "set_threads": (_UNTYPED, [_I]),
    "get_threads": (_UNTYPED, []),
}

# Those that return a number.
_COUNTS = ("packed_size", "get_threads", "vector_width", "multiply_registers")

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
    """A pool tensor as a ``PoolStruct``; ``address`` is that of the struct, valid while the view exists."""

    __slots__ = ("address", "block_nbytes", "dtype", "struct")

    def __init__(self, pool: Tensor) -> None:
        strides = pool.stride()
        if pool.dim() != 6 or strides[5] != 1 or strides[4] != pool.shape[5]:
            raise ValueError(f"a pool has six dimensions, the last two contiguous; got strides {strides}")
        self.dtype = pool.dtype
        # Of one block and layer.
        self.block_nbytes = 2 * pool.shape[3] * pool.shape[4] * pool.shape[5] * pool.element_size()
        sizes = pool.shape[3], pool.shape[4], head_dim_of(pool)
        self.struct = PoolStruct(pool.data_ptr(), *sizes, *strides[:4])
        self.address = ctypes.addressof(self.struct)


def view_of(pool: Tensor) -> PoolView:
    """The pool's view, made once and stored on the tensor, which gives both the same lifetime."""
    try:
        view: PoolView = pool._moonpool_view  # type: ignore[attr-defined]
    except AttributeError:
        view = PoolView(pool)
        pool._moonpool_view = view  # type: ignore[attr-defined]
    return view


class Library:
    """The functions, by name and dtypes: ``gil_held["rms_norm"][torch.float32](...)``."""

    def __init__(self, path: Path) -> None:
        self.gil_held = _bind(ctypes.PyDLL(str(path)))
        self.gil_released = _bind(ctypes.CDLL(str(path)))


def _bind(loaded: ctypes.CDLL) -> dict[str, dict[Any, Function]]:
    table: dict[str, dict[Any, Function]] = {}
    for name, (forms, arguments) in _FUNCTIONS.items():
        table[name] = {}
        for key, suffix in forms.items():
            function = getattr(loaded, f"{name}_{suffix}" if suffix else name)
            function.argtypes = arguments
            function.restype = _I if name in _COUNTS else None
            table[name][key] = function
    return table


@cache
def _loaded() -> tuple[Library | None, str]:
    if mode() == "torch":
        return None, "MOONPOOL_KERNELS=torch selects the torch forms"
    try:
        return Library(KERNELS.build()), ""
    except (BuildFailed, OSError) as error:
        log.warning("%s", error)
        return None, str(error)


def load() -> Library | None:
    """The library, compiled first if necessary.

    None if that fails (logged once) or if ``MOONPOOL_KERNELS=torch`` selects the torch forms.
    """
    return _loaded()[0]


def why_not() -> str:
    """Why ``load`` returns None; empty if it does not."""
    return _loaded()[1]
