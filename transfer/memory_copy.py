"""Vectored copies between the memory of processes of one host, or within one."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

from transfer import libc
from transfer.memory import address_of
from transfer.plan import pieces, vectors, windows
from transfer.span import U64

SLICE_NBYTES = 4 << 20
"""Bytes between two looks at whether the copy is still wanted: about 0.3 ms."""


def copy_from(pid: int, to: U64, source: U64, nbytes: U64, wanted: Callable[[], bool]) -> bool:
    """Copy ``nbytes[i]`` from ``source[i]`` in process ``pid`` to ``to[i]`` here. Releases the GIL while it
    copies.

    Returns False when ``wanted()`` became false on the way. Raises OSError: EFAULT where either side has no
    such memory, ESRCH when the process is gone, EPERM without the right.
    """
    if len(nbytes) and nbytes.max() > SLICE_NBYTES:
        run, skipped, nbytes = pieces(nbytes, SLICE_NBYTES)
        to, source = to[run] + skipped, source[run] + skipped
    here, there = vectors(to, nbytes), vectors(source, nbytes)
    here_address, there_address = address_of(here), address_of(there)
    for begin, end in windows(nbytes, libc.IOV_MAX, SLICE_NBYTES):
        if not wanted():
            return False
        count, row = end - begin, 16 * begin
        copied = libc.process_vm_readv(pid, here_address + row, count, there_address + row, count)
        if copied != int(nbytes[begin:end].sum()):
            raise OSError(14, "memory went away during a copy")
    return True


def copy_mapped(to: U64, source: U64, nbytes: U64, wanted: Callable[[], bool]) -> bool:
    """The same from memory mapped here, where process_vm_readv is forbidden even on oneself."""
    moved = 0
    for here, there, size in zip(to.tolist(), source.tolist(), nbytes.tolist(), strict=True):
        if moved >= SLICE_NBYTES:
            moved = 0
            if not wanted():
                return False
        ctypes.memmove(here, there, size)
        moved += size
    return wanted()
