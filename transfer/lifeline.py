"""A page of an agent that its peers on the same host can look at without asking it."""

from __future__ import annotations

import contextlib
import os
import select
from pathlib import Path

import numpy as np
import numpy.typing as npt

from transfer import libc
from transfer.descriptor import INCARNATION_NBYTES
from transfer.memory import address_of, allocate
from transfer.plan import vectors
from transfer.region import MAX_REGIONS

LIFELINE_NBYTES = INCARNATION_NBYTES + MAX_REGIONS


class Lifeline:
    """incarnation, then one byte a region: 1 while it is open.

    A peer that has copied from our memory reads the byte of the region afterwards: ids are never used twice,
    so an open region was open throughout.
    """

    def __init__(self, incarnation: bytes) -> None:
        self._memory = allocate(LIFELINE_NBYTES, "lifeline", "memfd")
        self._memory.array[:INCARNATION_NBYTES] = np.frombuffer(incarnation, np.uint8)
        self.address = address_of(self._memory.array)
        self.states: npt.NDArray[np.uint8] = self._memory.array[INCARNATION_NBYTES:]

    @property
    def fd(self) -> int:
        return self._memory.fd

    def close(self) -> None:
        self._memory.close()


class Process:
    """Another process on this host, held by a pidfd so that its number cannot come to mean another one."""

    def __init__(self, pid: int) -> None:
        """Raises OSError when there is no such process."""
        self.pid = pid
        self._fd = os.pidfd_open(pid)

    @property
    def alive(self) -> bool:
        if self._fd < 0:
            return False
        # One of its own: a poll object serves one thread at a time.
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        return not poll.poll(0)

    def read(self, address: int, nbytes: int) -> bytes:
        """Raises OSError when we may not, or when there is nothing."""
        copy = np.empty(nbytes, np.uint8)
        here = vectors(np.array([address_of(copy)], np.uint64), np.array([nbytes], np.uint64))
        there = vectors(np.array([address], np.uint64), np.array([nbytes], np.uint64))
        if libc.process_vm_readv(self.pid, address_of(here), 1, address_of(there), 1) != nbytes:
            raise OSError(14, "the other process has no memory there")
        return copy.tobytes()

    def close(self) -> None:
        """Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def living_process(pid: int) -> Process | None:
    """A process whose number is known here; else None."""
    try:
        return Process(pid) if pid > 0 else None
    except OSError:
        return None


def readable_process(pid: int, lifeline: int, incarnation: bytes) -> Process | None:
    """The process, if its memory can be read from here and it is the agent it says it is; else None."""
    process = living_process(pid)
    if process is None:
        return None
    # No right to (Yama, another user, seccomp), or another process: either way not by this path.
    with contextlib.suppress(OSError):
        if process.read(lifeline, INCARNATION_NBYTES) == incarnation:
            return process
    process.close()
    return None


def readable_by_peers() -> bool:
    """Whether other processes of this user can read ours, as far as it can be told from inside."""
    try:
        yama = int(Path("/proc/sys/kernel/yama/ptrace_scope").read_text())
    except (OSError, ValueError):
        yama = 0
    # 0: the same user; 1: whom we allow, and we allow all of the same user; beyond: only with privileges.
    if yama > 1 or not libc.is_dumpable():
        return False
    marker = np.frombuffer(os.urandom(8), np.uint8)
    process = living_process(os.getpid())
    if process is None:
        return False
    try:
        return process.read(address_of(marker), len(marker)) == marker.tobytes()
    except OSError:
        return False
    finally:
        process.close()
