"""The compiled library, and whether there is one.

``python -m moonpool.transfer.native`` compiles it ahead of time; the first agent does it otherwise. Without a
compiler, or with ``MOONPOOL_TRANSFER=plain``, system calls and xxhash's own package do the same, more slowly.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
from pathlib import Path

import numpy as np
import numpy.typing as npt

from moonpool.runtime.machine.compiled_library import BuildFailed, CompiledLibrary
from moonpool.runtime.machine.processor import instructions
from moonpool.transfer.native.arrays import U32, U64, address_of

_log = logging.getLogger(__name__)

Stop = npt.NDArray[np.uint8]
"""One byte, uint8 [1]: once it is not 0, whoever works for it leaves as soon as may be."""
NEVER: Stop = np.zeros(1, np.uint8)
SHORT_NBYTES = 240
"""The checksum of a run of up to so many bytes is not computed here."""
STRIPE_NBYTES = 64
"""A checksum of several runs goes over them so many bytes at a time."""
# Up to this size a call takes some 20 µs, less than it may take to win the GIL back from a busy thread.
_QUICK_NBYTES = 256 << 10
# More than a core's own cache keeps until somebody looks at it.
_STREAM_NBYTES = 2 << 20
_BASE_FLAGS = ("-O3", "-std=c++17", "-fPIC", "-fvisibility=hidden", "-w")
# What the source has a form for, best first; of any other processor it asks for nothing.
_FORMS = (("avx512f", "-mavx512f"), ("avx2", "-mavx2"))


def library(form: str) -> CompiledLibrary:
    """form: a flag for the compiler, or none."""
    return CompiledLibrary(
        "transfer",
        "the copying between processes",
        "slower system calls are used",
        Path(__file__).parent,
        (*_BASE_FLAGS, *([form] if form else [])),
    )


def forms() -> list[str]:
    """Those that run on this processor, best first; the plain one last."""
    has = instructions()
    return [*(flag for name, flag in _FORMS if name in has), ""]


class CompiledCopy:
    """The library's one function."""

    def __init__(self, path: Path) -> None:
        self._call, self._quick = (_declare(ctypes.CDLL(str(path))), _declare(ctypes.PyDLL(str(path))))

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
        """Copy ``nbytes[i]`` from address ``source[i]`` to ``to[i]``, all of which must be mapped; without
        ``to`` only look at them. False when it was stopped on the way.

        digests: uint64 [n], takes xxh3-64 of what was copied where that is more than ``SHORT_NBYTES``.
        counts: uint32, where several rows in turn are what one digest is of: how many; those before the last
        are multiples of ``STRIPE_NBYTES``, the last is not shorter. Many bytes go past the caches. Releases
        the GIL unless they are few.
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
    """None where it cannot be compiled, which is said once, or is not wanted."""
    if os.environ.get("MOONPOOL_TRANSFER") == "plain":
        return None
    try:
        return CompiledCopy(library(forms()[0]).build())
    except (BuildFailed, OSError) as error:
        _log.warning("%s", error)
        return None
