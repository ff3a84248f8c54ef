"""A page of an agent that its peers on the same host can look at without asking it."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from moonpool.transfer.connections.descriptor import INCARNATION_NBYTES
from moonpool.transfer.memory.allocation import allocate
from moonpool.transfer.memory.chunks import vectors
from moonpool.transfer.memory.region import MAX_OPEN_REGIONS, Region
from moonpool.transfer.native import libc
from moonpool.transfer.native.arrays import U32, address_of

_PLACES_OFFSET = INCARNATION_NBYTES + 4 * MAX_OPEN_REGIONS
_PLACE = struct.Struct("<QQq")
LIFELINE_NBYTES = _PLACES_OFFSET + _PLACE.size * MAX_OPEN_REGIONS


class Lifeline:
    """incarnation, then by slot the ids of the open regions, uint32 [MAX_OPEN_REGIONS], and where each is:
    address, bytes, descriptor of its memfd or -1, 64 bits each. See ``RegionTable``.

    A peer that has copied from our memory looks for the region's id afterwards: ids are never used twice, so
    a region that is open has been open throughout.
    """

    def __init__(self, incarnation: bytes) -> None:
        self._memory = allocate(LIFELINE_NBYTES, "lifeline", "memfd")
        self._memory.array[:INCARNATION_NBYTES] = np.frombuffer(incarnation, np.uint8)
        self.address = address_of(self._memory.array)
        self.open_ids: U32 = self._memory.array[INCARNATION_NBYTES:_PLACES_OFFSET].view(np.uint32)
        self._places = self._memory.array[_PLACES_OFFSET:]

    def place(self, region: Region) -> None:
        """Say where a region is; before its id is among the open ones."""
        at = _PLACE.size * (region.id % MAX_OPEN_REGIONS)
        _PLACE.pack_into(self._places.data, at, region.address, region.nbytes, region.fd)

    @property
    def fd(self) -> int:
        return self._memory.fd

    def close(self) -> None:
        self._memory.close()


def lifeline_parts(region_ids: Sequence[int]) -> list[tuple[int, int]]:
    """(offset, size) of what to look at for some regions: the incarnation, then the slot of each."""
    slots = [(INCARNATION_NBYTES + 4 * (region_id % MAX_OPEN_REGIONS), 4) for region_id in region_ids]
    return [(0, INCARNATION_NBYTES), *slots]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a region is in its owner's process. fd: of its memfd there, or -1."""

    address: int
    nbytes: int
    fd: int


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

    def read(self, address: int, parts: Sequence[tuple[int, int]]) -> bytes:
        """The bytes of each (offset from ``address``, size), joined. OSError: we may not, or there are
        none.
        """
        sizes = np.array([size for _, size in parts], np.uint64)
        copy = np.empty(int(sizes.sum()), np.uint8)
        here = vectors(np.array([address_of(copy)], np.uint64), np.array([len(copy)], np.uint64))
        there = vectors(np.array([address + offset for offset, _ in parts], np.uint64), sizes)
        num_parts = len(parts)
        if libc.process_vm_readv(
            self.pid, address_of(here), 1, address_of(there), num_parts, quick=True
        ) != len(copy):
            raise OSError(errno.EFAULT, "the other process has no memory there")
        return copy.tobytes()

    def place(self, lifeline: int, region_id: int) -> Place | None:
        """Where an open region of the agent with that ``lifeline`` is. OSError as ``read``."""
        slot = region_id % MAX_OPEN_REGIONS
        parts = [(INCARNATION_NBYTES + 4 * slot, 4), (_PLACES_OFFSET + _PLACE.size * slot, _PLACE.size)]
        facts = self.read(lifeline, parts)
        if not region_id or int.from_bytes(facts[:4], "little") != region_id:
            return None
        return Place(*_PLACE.unpack(facts[4:]))

    def descriptor(self, fd: int) -> int:
        """One of our own for its descriptor ``fd``. Raises OSError."""
        return libc.pidfd_getfd(self._fd, fd)

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
        if process.read(lifeline, lifeline_parts(())) == incarnation:
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
        return process.read(address_of(marker), [(0, len(marker))]) == marker.tobytes()
    except OSError:
        return False
    finally:
        process.close()
