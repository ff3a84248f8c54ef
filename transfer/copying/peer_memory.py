"""The memory of a peer on this host, by whichever way this host allows: its process, or its memfds mapped
here.
"""

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

from moonpool.transfer.connections.handshake import Identity
from moonpool.transfer.connections.wire import RegionInfo
from moonpool.transfer.copying.device import bounced
from moonpool.transfer.copying.memcpy import Copy, copy_from, copy_here
from moonpool.transfer.memory.allocation import map_shared
from moonpool.transfer.memory.lifeline import Place, Process, lifeline_parts
from moonpool.transfer.memory.region import Hold
from moonpool.transfer.native.arrays import address_of
from moonpool.transfer.native.compiled_copy import mover

_log = logging.getLogger(__name__)

LIFELINE_ID = 0
"""Not a region's id: asks for the lifeline itself."""


@dataclass(frozen=True, slots=True)
class Located:
    """Where regions begin, for ``copy``. keep: to be kept for as long as that is used."""

    copy: Copy
    bases: dict[int, int]
    keep: list[object]


class PeerMemory(Protocol):
    async def reach(self, region: RegionInfo) -> bool:
        """Get ready to read ``region``. False: it cannot be read this way."""

    def locate(self, regions: Sequence[RegionInfo], hold: Hold) -> Located:
        """Regions that were reached, to be copied from to memory of ``hold``."""

    def lifeline(self, region_ids: Sequence[int]) -> bytes:
        """The ``lifeline_parts`` of the peer, as they are now. OSError when it has ended."""

    def forget(self, region_id: int) -> None:
        """The peer closed it. From any thread."""

    def close(self) -> None:
        """Idempotent."""


class ProcessMemory:
    """All of the peer's memory: what it keeps in memfds is mapped, the rest is read with process_vm_readv."""

    def __init__(self, process: Process, peer: Identity) -> None:
        self._process = process
        self._peer = peer
        # None: not in a memfd, or that is not to be had.
        self._maps: dict[int, npt.NDArray[np.uint8] | None] = {}

    async def reach(self, region: RegionInfo) -> bool:
        if region.on_device:
            return False
        if region.id not in self._maps:
            # Where it has ended, the read finds out.
            with contextlib.suppress(OSError):
                self.place(region.id)
        return True

    def place(self, region_id: int) -> Place | None:
        """Where a region is at the peer, None when it is not open; it is mapped if it can be. From any
        thread. OSError when the peer has ended.
        """
        place = self._process.place(self._peer.lifeline, region_id)
        if place is not None and region_id not in self._maps:
            self._maps[region_id] = self._map(region_id, place)
        return place

    def _map(self, region_id: int, place: Place) -> npt.NDArray[np.uint8] | None:
        if place.fd < 0 or mover() is None:
            return None
        try:
            fd = self._process.descriptor(place.fd)
        except OSError as error:
            # Some sandboxes allow reading another process, but not this.
            _log.debug("the memfd of region %d cannot be had: %s", region_id, error)
            return None
        try:
            # The number may have come to mean another file, if the region was closed meanwhile.
            if self._process.place(self._peer.lifeline, region_id) != place:
                return None
            return map_shared(fd, place.nbytes)
        finally:
            os.close(fd)

    def locate(self, regions: Sequence[RegionInfo], hold: Hold) -> Located:
        return self.located({region.id: region.address for region in regions}, hold)

    def located(self, regions: Mapping[int, int], hold: Hold) -> Located:
        """The same by id and address at the peer."""
        maps = {region_id: self._maps.get(region_id) for region_id in regions}
        mapped = {region_id: address_of(array) for region_id, array in maps.items() if array is not None}
        if len(mapped) == len(regions):
            return Located(bounced(hold, copy_here), mapped, list(maps.values()))
        copy = functools.partial(copy_from, self._process.pid)
        return Located(bounced(hold, copy), dict(regions), [])

    def lifeline(self, region_ids: Sequence[int]) -> bytes:
        parts = self._process.read(self._peer.lifeline, lifeline_parts(region_ids))
        if not self._process.alive:
            raise ProcessLookupError("the process has ended")
        return parts

    def forget(self, region_id: int) -> None:
        # A copy that still runs keeps the array, so the map stays until it is through.
        self._maps.pop(region_id, None)

    def close(self) -> None:
        self._maps.clear()
        self._process.close()


class MappedMemory:
    """The regions that the peer keeps in memfds, mapped read-only. For hosts that forbid process_vm_readv."""

    def __init__(
        self,
        lifeline: npt.NDArray[np.uint8],
        map_region: Callable[[int, int], Awaitable[npt.NDArray[np.uint8]]],
        process: Process | None,
    ) -> None:
        """map_region(id, nbytes) asks the peer for a memfd. process: to see whether it lives, where it can
        be seen.
        """
        self._lifeline = lifeline
        self._map_region = map_region
        self._process = process
        self._mapping = asyncio.Lock()
        self._maps: dict[int, npt.NDArray[np.uint8]] = {}

    async def reach(self, region: RegionInfo) -> bool:
        async with self._mapping:
            if region.shared and region.id not in self._maps:
                self._maps[region.id] = await self._map_region(region.id, region.nbytes)
        return region.shared

    def locate(self, regions: Sequence[RegionInfo], hold: Hold) -> Located:
        maps = {region.id: self._maps[region.id] for region in regions}
        bases = {region_id: address_of(array) for region_id, array in maps.items()}
        return Located(bounced(hold, copy_here), bases, list(maps.values()))

    def lifeline(self, region_ids: Sequence[int]) -> bytes:
        if self._process is not None and not self._process.alive:
            raise ProcessLookupError("the process has ended")
        parts = lifeline_parts(region_ids)
        return b"".join(self._lifeline[offset : offset + size].tobytes() for offset, size in parts)

    def forget(self, region_id: int) -> None:
        self._maps.pop(region_id, None)

    def close(self) -> None:
        self._maps.clear()
        if self._process is not None:
            self._process.close()
