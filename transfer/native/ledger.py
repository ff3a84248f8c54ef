"""What peers may read and write, as native code knows it: small requests are served without the GIL."""

from __future__ import annotations

import ctypes
import math
import weakref
from collections.abc import Mapping

import numpy as np

from moonpool.transfer.native.arrays import U64, address_of
from moonpool.transfer.native.compiled_copy import compiled_copy

_FOREVER_NS = (1 << 63) - 1


class Ledger:
    """``serve_now.cpp``. From any thread. What is withdrawn is not used any more when the call returns."""

    def __init__(self, path: str) -> None:
        # A call keeps the GIL for less than a millisecond; ``serve`` releases it.
        quick, waiting = ctypes.PyDLL(path), ctypes.CDLL(path)
        pointer, u64, u32 = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32
        quick.moonpool_ledger_new.restype = pointer
        quick.moonpool_ledger_free.argtypes = (pointer,)
        self._ledger = pointer(quick.moonpool_ledger_new())
        weakref.finalize(self, quick.moonpool_ledger_free, self._ledger)
        self._grant, self._region = quick.moonpool_ledger_grant, quick.moonpool_ledger_region
        self._source, self._serve = quick.moonpool_ledger_source, waiting.moonpool_serve_now
        self._grant.argtypes = (pointer, u64, ctypes.c_int64, pointer, pointer, pointer, ctypes.c_int64)
        self._region.argtypes = (pointer, u32, u64, u64, ctypes.c_int)
        self._source.argtypes = (pointer, u64, u32, ctypes.c_char_p)
        self._serve.argtypes = (pointer, ctypes.c_int, u64)
        for function in (self._grant, self._region, self._source):
            function.restype = None
        self._serve.restype = u64

    def grant(self, grant_id: int, ranges: Mapping[int, tuple[U64, U64]], ends_at: float) -> None:
        """Let peers that name ``grant_id`` write ``ranges`` (begins and ends by region), until ``ends_at`` by
        ``time.monotonic``. Without ranges: withdraw it."""
        if not ranges:
            self._grant(self._ledger, grant_id, 0, None, None, None, 0)
            return
        begins = np.concatenate([of[0] for of in ranges.values()])
        ends = np.concatenate([of[1] for of in ranges.values()])
        regions = np.repeat(np.array([*ranges], np.uint32), [len(of[0]) for of in ranges.values()])
        ends_ns = _FOREVER_NS if ends_at == math.inf else int(ends_at * 1e9)
        addresses = map(address_of, (begins, ends, regions))
        self._grant(self._ledger, grant_id, ends_ns, *addresses, len(begins))

    def region(self, region_id: int, address: int, nbytes: int, *, writable: bool = False) -> None:
        """A region of ours in host memory. ``nbytes`` 0: withdraw it."""
        self._region(self._ledger, region_id, address, nbytes, writable)

    def source(self, connection: int, region_id: int, source: bytes | None) -> None:
        """A region of the peer at the other end of a connection: ``MappedRegion.source``. None: withdraw it;
        of region 0: all of the connection. What it names must be kept until then."""
        self._source(self._ledger, connection, region_id, source)

    def serve(self, fd: int, connection: int) -> int:
        """Serve small requests of a connection that blocks, until something else can be read there. Returns
        the number of bytes sent."""
        return int(self._serve(self._ledger, fd, connection))


def new_ledger() -> Ledger | None:
    """None: there is no compiler."""
    compiled = compiled_copy()
    return None if compiled is None else Ledger(compiled.path)
