"""Memory to move bytes from and to: prefaulted, in huge pages where that helps, or shareable by
descriptor.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from moonpool.transfer.native import libc
from moonpool.transfer.native.arrays import address_of

Backing = Literal["anonymous", "memfd", "registered", "cuda"]

HUGE_PAGE_NBYTES = 2 << 20
# A mapping whose file another process can shrink kills its reader with SIGBUS: sealed files only.
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_PREFAULT_STEP_NBYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Memory:
    """``array``: uint8 [nbytes], page-aligned. ``fd``: of the memfd behind it, or -1. Freed with its last
    view.
    """

    array: npt.NDArray[np.uint8]
    backing: Backing
    fd: int
    owner: object = None
    device = None

    @property
    def address(self) -> int:
        return address_of(self.array)

    @property
    def nbytes(self) -> int:
        return len(self.array)

    def close(self) -> None:
        """Give up the descriptor. The bytes go when nobody refers to ``array`` any more."""
        if self.fd >= 0:
            os.close(self.fd)


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Of the CUDA device with the ordinal ``device``: no array, because the processor cannot reach it.

    Freed with ``owner``.
    """

    address: int
    nbytes: int
    device: int
    owner: object
    backing: Backing = "cuda"
    fd: int = -1

    def close(self) -> None:
        """Nothing to give up."""


def allocate(nbytes: int, name: str, backing: Backing) -> Memory:
    """``nbytes`` of zeroed memory with every page present.

    anonymous: huge pages when it is large enough to hold one. memfd: any process that is sent the descriptor
    can map it.
    Raises MemoryError when the machine has not got it.
    """
    if backing == "memfd":
        return _allocate_memfd(nbytes, name)
    huge = nbytes >= HUGE_PAGE_NBYTES
    slack = HUGE_PAGE_NBYTES if huge else 0
    try:
        mapping = mmap.mmap(-1, nbytes + slack, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"cannot map {nbytes} bytes: {error}") from error
    whole: npt.NDArray[np.uint8] = np.frombuffer(mapping, np.uint8)
    start = -address_of(whole) % HUGE_PAGE_NBYTES if huge else 0
    memory = whole[start : start + nbytes]
    if huge:
        libc.madvise(address_of(memory), nbytes, libc.MADV_HUGEPAGE)
    _prefault(memory)
    return Memory(memory, "anonymous", -1)


def _allocate_memfd(nbytes: int, name: str) -> Memory:
    fd = os.memfd_create(f"moonpool-{name}"[:200], os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        # Pages that are there already are mapped three times as fast as others.
        os.posix_fallocate(fd, 0, nbytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
        memory: npt.NDArray[np.uint8] = np.frombuffer(mmap.mmap(fd, nbytes), np.uint8)
        # For hosts where shared memory may have huge pages; by default it may not.
        libc.madvise(address_of(memory), nbytes, libc.MADV_HUGEPAGE)
        _prefault(memory)
    except OSError as error:
        os.close(fd)
        raise MemoryError(f"cannot map {nbytes} bytes of shared memory: {error}") from error
    except BaseException:
        os.close(fd)
        raise
    return Memory(memory, "memfd", fd)


def adopt_shared(fd: int) -> Memory:
    """A memfd that other processes may have too. ValueError when its size may change."""
    if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & SEALS != SEALS:
        raise ValueError("only a memfd that is sealed at its size can be registered")
    own = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 0)
    return Memory(np.frombuffer(mmap.mmap(own, os.fstat(own).st_size), np.uint8), "memfd", own)


def map_shared(fd: int, nbytes: int) -> npt.NDArray[np.uint8]:
    """Map a peer's memfd read-only. OSError when it is not ``nbytes`` long for good."""
    if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & SEALS != SEALS or os.fstat(fd).st_size != nbytes:
        raise OSError(22, "the peer's shared memory is not sealed at its size")
    return np.frombuffer(mmap.mmap(fd, nbytes, prot=mmap.PROT_READ), np.uint8)


def _prefault(memory: npt.NDArray[np.uint8]) -> None:
    # In steps, so that a signal (Ctrl-C) is seen between them while gigabytes are zeroed.
    address, nbytes = address_of(memory), len(memory)
    for start in range(0, nbytes, _PREFAULT_STEP_NBYTES):
        step = min(_PREFAULT_STEP_NBYTES, nbytes - start)
        if not libc.madvise(address + start, step, libc.MADV_POPULATE_WRITE):
            memory[start : start + step : mmap.PAGESIZE] = 0
