"""Vectored copies between the memory of processes of one host, or within one."""

from __future__ import annotations

import ctypes
import errno
import os
from typing import Protocol

from moonpool.transfer.memory.checksum import checksums, fill_rest
from moonpool.transfer.memory.chunks import pieces, vectors, windows
from moonpool.transfer.native import libc
from moonpool.transfer.native.arrays import U64, address_of
from moonpool.transfer.native.compiled_copy import Stop, mover

SLICE_NBYTES = 4 << 20
"""Bytes between two looks at whether the copy is still wanted: about 0.3 ms."""
# Up to this size a copy takes some 30 µs, less than it may take to win the GIL back from a busy thread.
_QUICK_NBYTES = 256 << 10
# From this size on memmove is faster than the system call; below, the loop over rows in Python is slower.
_MEMMOVE_NBYTES = 128 << 10


class Copy(Protocol):
    """``copy_from`` for some process, or ``copy_here``."""

    def __call__(self, to: U64, source: U64, nbytes: U64, stop: Stop, digests: U64 | None) -> bool: ...


def copy_from(pid: int, to: U64, source: U64, nbytes: U64, stop: Stop, digests: U64 | None = None) -> bool:
    """Copy ``nbytes[i]`` from ``source[i]`` in process ``pid`` to ``to[i]`` here. Releases the GIL meanwhile.

    digests: uint64 [n], takes the checksum of what each run has become.
    Returns False when it was stopped on the way. Raises OSError: EFAULT where either side has no such memory,
    ESRCH when the process is gone, EPERM without the right.
    """
    wholes = to, nbytes
    if len(nbytes) and nbytes.max() > SLICE_NBYTES:
        run, skipped, nbytes = pieces(nbytes, SLICE_NBYTES)
        to, source = to[run] + skipped, source[run] + skipped
    here, there = vectors(to, nbytes), vectors(source, nbytes)
    here_address, there_address = address_of(here), address_of(there)
    for begin, end, size in windows(nbytes, libc.IOV_MAX, SLICE_NBYTES):
        if stop[0]:
            return False
        count, row = end - begin, 16 * begin
        here_row, there_row, quick = here_address + row, there_address + row, size <= _QUICK_NBYTES
        if libc.process_vm_readv(pid, here_row, count, there_row, count, quick=quick) != size:
            raise OSError(errno.EFAULT, "memory went away during a copy")
    if digests is not None:
        digests[:] = checksums(*wholes)
    return True


def copy_here(to: U64, source: U64, nbytes: U64, stop: Stop, digests: U64 | None = None) -> bool:
    """The same within this process, where both sides are known to be mapped; in one pass over memory where
    the compiled copy is there.
    """
    compiled = mover()
    if compiled is not None:
        whole = compiled.move(to, source, nbytes, stop=stop, digests=digests)
        if whole and digests is not None:
            fill_rest(digests, to, nbytes)
        return whole
    if len(nbytes) and int(nbytes.sum()) < _MEMMOVE_NBYTES * len(nbytes):
        try:
            return copy_from(os.getpid(), to, source, nbytes, stop, digests)
        except OSError as error:
            # A sandbox may forbid the call even on oneself.
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
