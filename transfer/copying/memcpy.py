"""Vectored copies of memory, within this process and from other processes of this host."""

from __future__ import annotations

import ctypes
import errno
import os
from typing import Protocol

import numpy as np
import xxhash

from moonpool.transfer.memory.checksum import checksums, fill_rest
from moonpool.transfer.memory.chunks import split_runs, vectors, windows
from moonpool.transfer.native import libc
from moonpool.transfer.native.arrays import U32, U64, address_of
from moonpool.transfer.native.compiled_copy import NEVER, SHORT_NBYTES, STRIPE_NBYTES, Stop, compiled_copy

SLICE_NBYTES = 4 << 20
"""Bytes between two looks at the stop byte: about 0.3 ms."""
# Up to this size a copy takes about 30 µs. Winning the GIL back from a busy thread may take longer.
_QUICK_NBYTES = 256 << 10
# From this size on memmove is faster than the system call. Below, the Python loop over rows is slower.
_MEMMOVE_NBYTES = 128 << 10


class Copy(Protocol):
    """``copy_here``, or ``copy_from`` for one process."""

    def __call__(self, to: U64, source: U64, nbytes: U64, stop: Stop, digests: U64 | None) -> bool: ...


def copy_from(pid: int, to: U64, source: U64, nbytes: U64, stop: Stop, digests: U64 | None = None) -> bool:
    """Copy ``nbytes[i]`` from ``source[i]`` in process ``pid`` to ``to[i]`` here. Releases the GIL.

    digests: uint64 [n], receives the checksum of each copied run.
    Returns False when it was stopped. Raises OSError: EFAULT if either side has no such memory, ESRCH if
    the process is gone, EPERM without permission.
    """
    wholes = to, nbytes
    if len(nbytes) and nbytes.max() > SLICE_NBYTES:
        run, skipped, nbytes = split_runs(nbytes, SLICE_NBYTES)
        to, source = to[run] + skipped, source[run] + skipped
    here, there = vectors(to, nbytes), vectors(source, nbytes)
    here_address, there_address = address_of(here), address_of(there)
    for begin, end, size in windows(nbytes, libc.IOV_MAX, SLICE_NBYTES):
        if stop[0]:
            return False
        count, row = end - begin, 16 * begin
        here_row, there_row, quick = here_address + row, there_address + row, size <= _QUICK_NBYTES
        if libc.process_vm_readv(pid, here_row, count, there_row, count, quick=quick) != size:
            raise OSError(errno.EFAULT, "memory was unmapped during a copy")
    if digests is not None:
        digests[:] = checksums(*wholes)
    return True


def copy_here(to: U64, source: U64, nbytes: U64, stop: Stop, digests: U64 | None = None) -> bool:
    """``copy_from`` within this process. Both sides must be mapped. One pass with the compiled copy."""
    compiled = compiled_copy()
    if compiled is not None:
        whole = compiled.move(to, source, nbytes, stop=stop, digests=digests)
        if whole and digests is not None:
            fill_rest(digests, to, nbytes)
        return whole
    if len(nbytes) and int(nbytes.sum()) < _MEMMOVE_NBYTES * len(nbytes):
        try:
            return copy_from(os.getpid(), to, source, nbytes, stop, digests)
        except OSError as error:
            # A sandbox may forbid the call even on the own process.
            if error.errno not in (errno.ENOSYS, errno.EPERM):
                raise
    for here, there, size in zip(to.tolist(), source.tolist(), nbytes.tolist(), strict=True):
        for skipped in range(0, size, SLICE_NBYTES):
            if stop[0]:
                return False
            ctypes.memmove(here + skipped, there + skipped, min(SLICE_NBYTES, size - skipped))
    if digests is not None:
        digests[:] = checksums(to, nbytes)
    return True


def move_runs(
    to: U64 | None, source: U64, nbytes: U64, counts: U32, *, stop: Stop = NEVER, digests: U64 | None = None
) -> bool:
    """Copy spans that consist of several runs, and checksum each span as one.

    to, source: addresses, uint64 [rows], which must be mapped; without ``to`` nothing is copied. nbytes:
    uint64 [rows]. counts: uint32 [spans], the number of consecutive rows of each span. digests: uint64
    [spans], receives the checksums. Returns False when it was stopped. Releases the GIL for large copies.
    """
    compiled = compiled_copy()
    if compiled is not None and (digests is None or _in_stripes(nbytes, counts)):
        return compiled.move(to, source, nbytes, stop=stop, digests=digests, counts=counts)
    rows = zip(source.tolist() if to is None else to.tolist(), source.tolist(), nbytes.tolist(), strict=True)
    for span, count in enumerate(counts.tolist()):
        if stop[0]:
            return False
        digest = xxhash.xxh3_64()
        for _ in range(count):
            here, there, size = next(rows)
            if to is not None:
                ctypes.memmove(here, there, size)
            digest.update((ctypes.c_char * size).from_address(here))
        if digests is not None:
            digests[span] = digest.intdigest()
    return True


def _in_stripes(nbytes: U64, counts: U32) -> bool:
    """Whether the compiled code can checksum these: only a span's last run may end within a stripe."""
    ends = np.cumsum(counts, dtype=np.intp)
    wholes = np.add.reduceat(nbytes, ends - counts)
    if wholes.min() <= SHORT_NBYTES or nbytes.min() < STRIPE_NBYTES:
        return False
    return not (np.delete(nbytes, ends - 1) % np.uint64(STRIPE_NBYTES)).any()
