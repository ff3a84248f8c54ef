"""The lifeline: memory of an agent that peers on its host read without asking."""

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
import numpy.typing as npt

from moonpool.transfer.memory.allocation import allocate, map_shared
from moonpool.transfer.memory.chunks import vectors
from moonpool.transfer.memory.region import MAX_OPEN_REGIONS, Region
from moonpool.transfer.native import libc
from moonpool.transfer.native.arrays import U32, address_of

INCARNATION_NBYTES = 16
_LOCATIONS_OFFSET = INCARNATION_NBYTES + 4 * MAX_OPEN_REGIONS
_LOCATION = struct.Struct("<QQq")
LIFELINE_NBYTES = _LOCATIONS_OFFSET + _LOCATION.size * MAX_OPEN_REGIONS


class Lifeline:
    """The agent's incarnation, then by slot (see ``RegionTable``) the ids and the locations of open regions.

    ids: uint32 [MAX_OPEN_REGIONS]. Locations: address, bytes, descriptor of the memfd or -1, 64 bits each; in
    slot 0, which no region has, the lifeline's own.
    A peer that has copied from our memory looks for the region's id afterwards. Ids are never reused, so a
    region that is open then was open during the copy.
    """

    def __init__(self, incarnation: bytes) -> None:
        self._memory = allocate(LIFELINE_NBYTES, "lifeline", "memfd")
        self._memory.array[:INCARNATION_NBYTES] = np.frombuffer(incarnation, np.uint8)
        self.address = address_of(self._memory.array)
        self.open_ids: U32 = self._memory.array[INCARNATION_NBYTES:_LOCATIONS_OFFSET].view(np.uint32)
        self._locations = self._memory.array[_LOCATIONS_OFFSET:]
        _LOCATION.pack_into(self._locations.data, 0, self.address, LIFELINE_NBYTES, self.fd)

    def publish(self, region: Region) -> None:
        """Write a region's location. Call before its id is written to ``open_ids``."""
        at = _LOCATION.size * (region.id % MAX_OPEN_REGIONS)
        _LOCATION.pack_into(self._locations.data, at, region.address, region.nbytes, region.fd)

    @property
    def fd(self) -> int:
        return self._memory.fd

    def close(self) -> None:
        self._memory.close()


def lifeline_parts(region_ids: Sequence[int]) -> list[tuple[int, int]]:
    """(offset, size) of the incarnation and of the id slot of each region."""
    slots = [(INCARNATION_NBYTES + 4 * (region_id % MAX_OPEN_REGIONS), 4) for region_id in region_ids]
    return [(0, INCARNATION_NBYTES), *slots]


@dataclass(frozen=True, slots=True)
class RegionLocation:
    """The location of a region in its owner's process. fd: of its memfd there, or -1."""

    address: int
    nbytes: int
    fd: int


class Process:
    """Another process of this host. Its pidfd stays valid even when its number is reused."""

    def __init__(self, pid: int) -> None:
        """Raises OSError when there is no such process."""
        self.pid = pid
        self.pidfd = os.pidfd_open(pid)
        """-1 once it is closed."""

    @property
    def alive(self) -> bool:
        if self.pidfd < 0:
            return False
        # A poll object of its own: one cannot be used by several threads.
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        return not poll.poll(0)

    def read(self, address: int, parts: Sequence[tuple[int, int]]) -> bytes:
        """Read the bytes of each (offset from ``address``, size), joined. Raises OSError."""
        sizes = np.array([size for _, size in parts], np.uint64)
        copy = np.empty(int(sizes.sum()), np.uint8)
        here = vectors(np.array([address_of(copy)], np.uint64), np.array([len(copy)], np.uint64))
        there = vectors(np.array([address + offset for offset, _ in parts], np.uint64), sizes)
        copied = libc.process_vm_readv(
            self.pid, address_of(here), 1, address_of(there), len(parts), quick=True
        )
        if copied != len(copy):
            raise OSError(errno.EFAULT, "the other process has no memory at this address")
        return copy.tobytes()

    def region_location(self, lifeline: int, region_id: int) -> RegionLocation | None:
        """The location of an open region of the agent with that ``lifeline``. Raises OSError."""
        slot = region_id % MAX_OPEN_REGIONS
        id_part = (INCARNATION_NBYTES + 4 * slot, 4)
        location = self.read(lifeline, [id_part, (_LOCATIONS_OFFSET + _LOCATION.size * slot, _LOCATION.size)])
        if not region_id or int.from_bytes(location[:4], "little") != region_id:
            return None
        return RegionLocation(*_LOCATION.unpack(location[4:]))

    def map_lifeline(self, lifeline: int, incarnation: bytes) -> npt.NDArray[np.uint8] | None:
        """Map the ``lifeline`` of the agent with that ``incarnation`` read-only. None: that fails."""
        with contextlib.suppress(OSError):
            _, _, own = _LOCATION.unpack(self.read(lifeline, [(_LOCATIONS_OFFSET, _LOCATION.size)]))
            fd = self.descriptor(own)
            try:
                page = map_shared(fd, LIFELINE_NBYTES)
            finally:
                os.close(fd)
            # Otherwise the descriptor has become another file's.
            if page[:INCARNATION_NBYTES].tobytes() == incarnation:
                return page
        return None

    def descriptor(self, fd: int) -> int:
        """Duplicate its file descriptor ``fd``. Raises OSError."""
        return libc.pidfd_getfd(self.pidfd, fd)

    def close(self) -> None:
        """Idempotent."""
        fd, self.pidfd = self.pidfd, -1
        if fd >= 0:
            os.close(fd)


def living_process(pid: int) -> Process | None:
    """The process, or None if the pid is 0 or unknown."""
    try:
        return Process(pid) if pid > 0 else None
    except OSError:
        return None


def readable_process(pid: int, lifeline: int, incarnation: bytes) -> Process | None:
    """The process, if we may read its memory and it is the agent with that ``incarnation``; else None."""
    process = living_process(pid)
    if process is None:
        return None
    # An OSError means no permission (Yama, another user, seccomp) or another process.
    with contextlib.suppress(OSError):
        if process.read(lifeline, lifeline_parts(())) == incarnation:
            return process
    process.close()
    return None


_reader: Process | None = None


def name_reader(pid: int) -> None:
    """Let a peer that has proved itself read this process, where Yama allows that to parents only.

    Yama knows one such process: it is the first, while it lives. All others read our memfds, which they map
    read-only, and get the rest through sockets.
    """
    global _reader
    if pid <= 0 or (_reader is not None and _reader.alive):
        return
    if _reader is not None:
        _reader.close()
    process = living_process(pid)
    _reader = process if process is not None and libc.allow_reader(pid) else None
    if process is not None and _reader is None:
        process.close()


def yama_scope() -> int:
    """0: processes of one user may read each other, as without Yama; 1: parents and a named process may read
    their children; above: privileged processes only."""
    try:
        return int(Path("/proc/sys/kernel/yama/ptrace_scope").read_text())
    except (OSError, ValueError):
        return 0


def readable_by_peers() -> bool:
    """Whether several other processes of this user can probably read this one."""
    if yama_scope() > 0 or not libc.is_dumpable():
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
