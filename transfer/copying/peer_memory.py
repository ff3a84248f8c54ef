"""Reading the memory of a peer on this host: from its process, or from its memfds, mapped here."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from moonpool.transfer.connections.handshake import Authenticated, Identity
from moonpool.transfer.connections.wire import RegionInfo
from moonpool.transfer.copying.device import through_staging
from moonpool.transfer.copying.memcpy import Copy, copy_from, copy_here
from moonpool.transfer.errors import PeerLost, RegionError
from moonpool.transfer.memory.allocation import map_shared
from moonpool.transfer.memory.lifeline import (
    INCARNATION_NBYTES,
    Process,
    RegionLocation,
    lifeline_parts,
    readable_process,
)
from moonpool.transfer.memory.region import Hold
from moonpool.transfer.native.arrays import address_of
from moonpool.transfer.native.compiled_copy import compiled_copy

_log = logging.getLogger(__name__)

LIFELINE_ID = 0
"""Used in place of a region's id, to ask for the lifeline."""


def check_lifeline(lifeline: bytes, peer: Identity, region_ids: Sequence[int]) -> None:
    """Check the ``lifeline_parts`` read after a copy. Region ids are never reused.

    Raises PeerLost when it is another process's, RegionError when a region was closed.
    """
    if lifeline[:INCARNATION_NBYTES] != peer.incarnation:
        raise PeerLost(peer.agent_id, "its process is gone")
    open_ids = np.frombuffer(lifeline, np.uint32, offset=INCARNATION_NBYTES).tolist()
    for region_id, open_id in zip(region_ids, open_ids, strict=True):
        if region_id != open_id:
            raise RegionError(region_id, "was closed by its owner during the read")


@dataclass(frozen=True, slots=True)
class CopySource:
    """The addresses of regions by id, for ``copy``. keep: objects that must live until the copy is done."""

    copy: Copy
    bases: dict[int, int]
    keep: list[object]


@dataclass(frozen=True, slots=True)
class Witness:
    """Where native code sees that a peer has a region open: its lifeline, mapped here. pidfd: of its process,
    to see that it lives, or -1."""

    lifeline: npt.NDArray[np.uint8]
    pidfd: int


class PeerMemory(Protocol):
    async def reach(self, region: RegionInfo) -> bool:
        """Prepare to read ``region``. False: it cannot be read this way. Raises RegionError: it was closed
        meanwhile."""

    def locate(self, regions: Sequence[RegionInfo], hold: Hold) -> CopySource:
        """The source of copies from reached regions to memory of ``hold``."""

    def lifeline(self, region_ids: Sequence[int]) -> bytes:
        """The current ``lifeline_parts`` of the peer. Raises OSError when its process has ended."""

    def mapping(self, region_id: int) -> npt.NDArray[np.uint8] | None:
        """The map of a reached region, uint8; None: it is not mapped."""

    def witness(self) -> Witness | None:
        """Valid until ``close``. None: the lifeline cannot be mapped."""

    def forget(self, region_id: int) -> None:
        """The peer closed the region. From any thread."""

    def close(self) -> None:
        """Idempotent."""


class ProcessMemory:
    """All memory of a peer that may be read: memfds are mapped, the rest is read by process_vm_readv."""

    def __init__(self, process: Process, peer: Identity) -> None:
        self._process = process
        self._peer = peer
        # None: the region has no memfd, or it cannot be mapped.
        self._maps: dict[int, npt.NDArray[np.uint8] | None] = {}
        self._witness: Witness | None = None

    @classmethod
    def of(cls, remote: Authenticated) -> ProcessMemory | None:
        """None: we may not read its memory."""
        peer = remote.identity
        process = readable_process(remote.pid, peer.lifeline, peer.incarnation)
        return None if process is None else cls(process, peer)

    async def reach(self, region: RegionInfo) -> bool:
        if region.on_device:
            return False
        if region.id not in self._maps:
            # If the process has ended, the read finds out.
            with contextlib.suppress(OSError):
                self.locate_region(region.id)
        return True

    def locate_region(self, region_id: int) -> RegionLocation | None:
        """The location of an open region, which is mapped if possible; None: it is not open.

        From any thread. Raises OSError when the process has ended.
        """
        location = self._process.region_location(self._peer.lifeline, region_id)
        if location is not None and region_id not in self._maps:
            self._maps[region_id] = self._map(region_id, location)
            # If the region was closed meanwhile, ``forget`` may have run before the map was there.
            if self._process.region_location(self._peer.lifeline, region_id) is None:
                self.forget(region_id)
                return None
        return location

    def _map(self, region_id: int, location: RegionLocation) -> npt.NDArray[np.uint8] | None:
        if location.fd < 0 or compiled_copy() is None:
            return None
        try:
            fd = self._process.descriptor(location.fd)
        except OSError as error:
            # Some sandboxes allow reading another process, but not this.
            _log.debug("the memfd of region %d cannot be mapped: %s", region_id, error)
            return None
        try:
            # If the region was closed meanwhile, the descriptor may be another file's.
            if self._process.region_location(self._peer.lifeline, region_id) != location:
                return None
            return map_shared(fd, location.nbytes)
        finally:
            os.close(fd)

    def locate(self, regions: Sequence[RegionInfo], hold: Hold) -> CopySource:
        return self.source({region.id: region.address for region in regions}, hold)

    def source(self, addresses: Mapping[int, int], hold: Hold) -> CopySource:
        """``locate``, by id and address at the peer."""
        maps = {region_id: self._maps.get(region_id) for region_id in addresses}
        mapped = {region_id: address_of(array) for region_id, array in maps.items() if array is not None}
        if len(mapped) == len(addresses):
            return CopySource(through_staging(hold, copy_here), mapped, list(maps.values()))
        copy = functools.partial(copy_from, self._process.pid)
        return CopySource(through_staging(hold, copy), dict(addresses), [])

    def lifeline(self, region_ids: Sequence[int]) -> bytes:
        parts = self._process.read(self._peer.lifeline, lifeline_parts(region_ids))
        if not self._process.alive:
            raise ProcessLookupError("the process has ended")
        return parts

    def mapping(self, region_id: int) -> npt.NDArray[np.uint8] | None:
        return self._maps.get(region_id)

    def witness(self) -> Witness | None:
        if self._witness is None:
            lifeline = self._process.map_lifeline(self._peer.lifeline, self._peer.incarnation)
            self._witness = None if lifeline is None else Witness(lifeline, self._process.pidfd)
        return self._witness

    def forget(self, region_id: int) -> None:
        # A running copy keeps the array, and so the map.
        self._maps.pop(region_id, None)

    def close(self) -> None:
        self._maps.clear()
        self._witness = None
        self._process.close()


class MappedMemory:
    """The memfds of a peer, mapped read-only. For hosts that forbid process_vm_readv."""

    def __init__(
        self,
        lifeline: npt.NDArray[np.uint8],
        map_region: Callable[[int, int], Awaitable[npt.NDArray[np.uint8]]],
        process: Process | None,
    ) -> None:
        """map_region(id, nbytes) asks the peer for a memfd. process: None if the peer's pid is unknown."""
        self._lifeline = lifeline
        self._map_region = map_region
        self._process = process
        self._mapping = asyncio.Lock()
        self._maps: dict[int, npt.NDArray[np.uint8]] = {}

    async def reach(self, region: RegionInfo) -> bool:
        async with self._mapping:
            if region.shared and region.id not in self._maps:
                mapped = await self._map_region(region.id, region.nbytes)
                offset, size = lifeline_parts([region.id])[1]
                # If the region was closed meanwhile, ``forget`` may have run before the map was there.
                if self._lifeline[offset : offset + size].view(np.uint32).item() != region.id:
                    raise RegionError(region.id, "was closed by its owner")
                self._maps[region.id] = mapped
        return region.shared

    def locate(self, regions: Sequence[RegionInfo], hold: Hold) -> CopySource:
        maps = {region.id: self._maps[region.id] for region in regions}
        bases = {region_id: address_of(array) for region_id, array in maps.items()}
        return CopySource(through_staging(hold, copy_here), bases, list(maps.values()))

    def lifeline(self, region_ids: Sequence[int]) -> bytes:
        if self._process is not None and not self._process.alive:
            raise ProcessLookupError("the process has ended")
        parts = lifeline_parts(region_ids)
        return b"".join(self._lifeline[offset : offset + size].tobytes() for offset, size in parts)

    def mapping(self, region_id: int) -> npt.NDArray[np.uint8] | None:
        return self._maps.get(region_id)

    def witness(self) -> Witness:
        return Witness(self._lifeline, -1 if self._process is None else self._process.pidfd)

    def forget(self, region_id: int) -> None:
        self._maps.pop(region_id, None)

    def close(self) -> None:
        self._maps.clear()
        if self._process is not None:
            self._process.close()
