"""Allocated memory: prefaulted, in huge pages or shareable by a memfd."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from moonpool.transfer.native import libc
from moonpool.transfer.native.arrays import address_of

Backing = Literal["anonymous", "memfd", "registered", "cuda"]

HUGE_PAGE_NBYTES = 2 << 20
# If another process shrinks a mapped file, its readers die of SIGBUS. So only sealed files are mapped.
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
# Peers map the file only for reading: what they write goes through us, under a grant. Not before Linux 5.1.
_SEAL_FUTURE_WRITE = 0x10
_PREFAULT_STEP_NBYTES = 64 << 20
# Takes about 2 ms, in which no thread of this process can map memory.
_BACKGROUND_STEP_NBYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class Memory:
    """Host memory. array: uint8 [nbytes]; its last view frees it. fd: of its memfd, or -1."""

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
        """Close the descriptor. The bytes are freed with the last reference to ``array``."""
        if self.fd >= 0:
            os.close(self.fd)


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Memory of the CUDA device with ordinal ``device``, freed with ``owner``."""

    address: int
    nbytes: int
    device: int
    owner: object
    backing: Backing = "cuda"
    fd: int = -1

    def close(self) -> None:
        """There is nothing to close."""


def allocate(nbytes: int, name: str, backing: Backing, *, mapped: bool = True) -> Memory:
    """Allocate zeroed memory with every page present.

    backing: anonymous memory has huge pages; a memfd can be mapped by processes that receive its descriptor.
    mapped: False: of a memfd the pages exist, and each is mapped when it is touched or by ``map_steps``.
    Raises MemoryError when the machine has not enough.
    """
    if backing == "memfd":
        return _allocate_memfd(nbytes, name, mapped)
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


def _allocate_memfd(nbytes: int, name: str, mapped: bool) -> Memory:
    fd = os.memfd_create(f"moonpool-{name}"[:200], os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        # Existing pages are mapped three times as fast.
        os.posix_fallocate(fd, 0, nbytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
        memory: npt.NDArray[np.uint8] = np.frombuffer(mmap.mmap(fd, nbytes), np.uint8)
        # Takes effect on hosts that allow huge pages for shared memory; most do not.
        libc.madvise(address_of(memory), nbytes, libc.MADV_HUGEPAGE)
        if mapped:
            _prefault(memory)
        with contextlib.suppress(OSError):
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEAL_FUTURE_WRITE)
    except OSError as error:
        os.close(fd)
        raise MemoryError(f"cannot map {nbytes} bytes of shared memory: {error}") from error
    except BaseException:
        os.close(fd)
        raise
    return Memory(memory, "memfd", fd)


def map_steps(nbytes: int) -> Iterator[slice]:
    """The parts of so many bytes to pass to ``map_pages`` one after the other."""
    return (slice(i, i + _BACKGROUND_STEP_NBYTES) for i in range(0, nbytes, _BACKGROUND_STEP_NBYTES))


def map_pages(memory: npt.NDArray[np.uint8]) -> None:
    """Map pages that exist, so that no access has to; they may be in use. Nothing before Linux 5.14."""
    libc.madvise(address_of(memory), len(memory), libc.MADV_POPULATE_WRITE)


def adopt_shared(fd: int) -> Memory:
    """Map a memfd that other processes share. Raises ValueError when its size may change, OSError."""
    if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & SEALS != SEALS:
        raise ValueError("the memfd must be sealed against shrinking and growing")
    own = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 0)
    return Memory(np.frombuffer(mmap.mmap(own, os.fstat(own).st_size), np.uint8), "memfd", own)


def map_shared(fd: int, nbytes: int) -> npt.NDArray[np.uint8]:
    """Map a peer's memfd read-only. Raises OSError when it is not sealed at ``nbytes``."""
    if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & SEALS != SEALS or os.fstat(fd).st_size != nbytes:
        raise OSError(22, "the peer's shared memory is not sealed at its size")
    return np.frombuffer(mmap.mmap(fd, nbytes, prot=mmap.PROT_READ), np.uint8)


def _prefault(memory: npt.NDArray[np.uint8]) -> None:
    # In steps: a signal (Ctrl-C) is handled between them.
    address, nbytes = address_of(memory), len(memory)
    for start in range(0, nbytes, _PREFAULT_STEP_NBYTES):
        step = min(_PREFAULT_STEP_NBYTES, nbytes - start)
        if not libc.madvise(address + start, step, libc.MADV_POPULATE_WRITE):
            memory[start : start + step : mmap.PAGESIZE] = 0
