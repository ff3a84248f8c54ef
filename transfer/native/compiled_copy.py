"""The compiled copy: copies and checksums many runs of memory in one call.

``python -m moonpool.transfer.native`` compiles it; otherwise the first agent does. Without a compiler, or
with ``MOONPOOL_TRANSFER=plain``, slower system calls and the package xxhash replace it.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from moonpool.runtime.machine.compiled_library import BuildFailed, CompiledLibrary
from moonpool.runtime.machine.processor import instructions
from moonpool.transfer.native.arrays import U32, U64, address_of

_log = logging.getLogger(__name__)

Stop = npt.NDArray[np.uint8]
"""uint8 [1]: copies stop soon after it becomes non-zero."""
NEVER: Stop = np.zeros(1, np.uint8)
SHORT_NBYTES = 240
"""Checksums of runs up to this size are not computed here."""
Reply = ctypes.Array[ctypes.c_char]
"""A buffer for a reply."""
STRIPE_NBYTES = 64
"""Checksums of several runs process them in stripes of this size."""
# Up to this size a call takes about 20 µs. Winning the GIL back from a busy thread may take longer.
_QUICK_NBYTES = 256 << 10
# So long a reply is awaited with the GIL, for the same reason.
_SPIN_NS = 30_000
# More than a core's own cache keeps until the bytes are used.
_STREAM_NBYTES = 2 << 20
_BASE_FLAGS = ("-O3", "-std=c++17", "-fPIC", "-fvisibility=hidden", "-w")
# Instruction sets that the source has code for, best first. Other processors get portable code.
_FORMS = (("avx512f", "-mavx512f"), ("avx2", "-mavx2"))


def library(form: str) -> CompiledLibrary:
    """form: a compiler flag, or empty."""
    return CompiledLibrary(
        "transfer",
        "the copying between processes",
        "slower system calls are used",
        Path(__file__).parent,
        (*_BASE_FLAGS, *([form] if form else [])),
    )


def forms() -> list[str]:
    """Compiler flags for this processor, best first; the last is empty."""
    has = instructions()
    return [*(flag for name, flag in _FORMS if name in has), ""]


class CompiledCopy:
    """The library's functions."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        # Keeps the GIL: winning it back from a busy thread may take longer than the call.
        quick = ctypes.PyDLL(str(path))
        self._call, self._quick = _declare(ctypes.CDLL(str(path))), _declare(quick)
        self.read_now: Callable[[bytes, int, int, int, int, bytes, bool, int], int] = quick.moonpool_read_now
        """``moonpool_read_now`` of ``read_now.cpp``."""
        quick.moonpool_read_now.restype = ctypes.c_int64
        size, bytes_ = ctypes.c_uint64, ctypes.c_char_p
        quick.moonpool_read_now.argtypes = (
            *(bytes_, ctypes.c_uint32, size, size),
            *(ctypes.c_int64, bytes_, ctypes.c_int, size),
        )
        self._ask_quick, self._ask = quick.moonpool_ask_now, ctypes.CDLL(str(path)).moonpool_ask_now
        for function in (self._ask_quick, self._ask):
            function.restype = ctypes.c_int64
            function.argtypes = (ctypes.c_int, bytes_, size, ctypes.c_void_p, size, size, ctypes.c_int64)

    def ask_now(self, fd: int, request: bytes, reply: Reply, wait_s: float) -> bytes | None:
        """Send a short request on an idle stream socket, and return its reply; empty, if it is not complete
        within ``wait_s``. reply: a buffer. None: the request was not sent."""
        most = len(reply)
        came = self._ask_quick(fd, request, len(request), reply, most, 0, _SPIN_NS)
        if came < 0:
            came = self._ask(fd, None, 0, reply, most, -1 - came, int(wait_s * 1e9))
        elif not came:
            return None
        return ctypes.string_at(reply, max(came, 0))

    def move(
        self,
        to: U64 | None,
        source: U64,
        nbytes: U64,
        *,
        stop: Stop = NEVER,
        digests: U64 | None = None,
        counts: U32 | None = None,
    ) -> bool:
        """Copy ``nbytes[i]`` from address ``source[i]`` to ``to[i]``; all must be mapped. False: stopped.

        to: None: only compute digests. digests: uint64 [n], receives xxh3-64 of runs over ``SHORT_NBYTES``.
        counts: uint32, number of consecutive rows of each digest. Rows before its last one must be multiples
        of ``STRIPE_NBYTES``, and the last one not shorter than that. Large copies bypass the caches and
        release the GIL.
        """
        num_spans = len(nbytes) if counts is None else len(counts)
        whole = int(nbytes.sum())
        done = (self._quick if whole <= _QUICK_NBYTES else self._call)(
            num_spans,
            None if to is None else address_of(to),
            address_of(source),
            address_of(nbytes),
            None if counts is None else address_of(counts),
            whole >= _STREAM_NBYTES,
            None if digests is None else address_of(digests),
            address_of(stop),
        )
        return bool(done == num_spans)


def _declare(loaded: ctypes.CDLL) -> ctypes._NamedFuncPointer:
    function = loaded.moonpool_move
    function.restype = ctypes.c_int64
    pointer = ctypes.c_void_p
    function.argtypes = (ctypes.c_int64, *[pointer] * 4, ctypes.c_int, *[pointer] * 2)
    return function


@functools.cache
def compiled_copy() -> CompiledCopy | None:
    """The compiled copy; None: it cannot be compiled (logged once), or is disabled."""
    if os.environ.get("MOONPOOL_TRANSFER") == "plain":
        return None
    try:
        return CompiledCopy(library(forms()[0]).build())
    except (BuildFailed, OSError) as error:
        _log.warning("%s", error)
        return None
