"""The memory of a peer on this host, by whichever way this host allows: its process, or its memfds mapped
here.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from transfer.copy_job import Copy
from transfer.cuda.copy import bounced
from transfer.handshake import Identity
from transfer.lifeline import Process, lifeline_parts
from transfer.memory import address_of
from transfer.memory_copy import copy_from, copy_here
from transfer.region import Hold
from transfer.wire import RegionInfo

LIFELINE_ID = 0
"""Not a region's id: asks for the lifeline itself."""


class PeerMemory(Protocol):
    def copier(self, hold: Hold) -> Copy:
        """Copies from the addresses that ``base`` gives to memory of ``hold``."""

    async def reach(self, region: RegionInfo) -> bool:
        """Get ready to read ``region``. False: it cannot be read this way."""

    def base(self, region: RegionInfo) -> tuple[int, object]:
        """Where a reached region begins, for ``copy``; and what to keep for as long as that is used."""

    def lifeline(self, region_ids: Sequence[int]) -> bytes:
        """The ``lifeline_parts`` of the peer, as they are now. OSError when it has ended."""

    def forget(self, region_id: int) -> None:
        """The peer closed it."""

    def close(self) -> None:
        """Idempotent."""


class ProcessMemory:
    """All of the peer's memory, with process_vm_readv."""

    def __init__(self, process: Process, peer: Identity) -> None:
        self._process = process
        self._peer = peer

    def copier(self, hold: Hold) -> Copy:
        return bounced(hold, functools.partial(copy_from, self._process.pid))

    async def reach(self, region: RegionInfo) -> bool:
        return not region.on_device

    def base(self, region: RegionInfo) -> tuple[int, object]:
        return region.address, None

    def lifeline(self, region_ids: Sequence[int]) -> bytes:
        parts = self._process.read(self._peer.lifeline, lifeline_parts(region_ids))
        if not self._process.alive:
            raise ProcessLookupError("the process has ended")
        return parts

    def forget(self, region_id: int) -> None:
        pass

    def close(self) -> None:
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

    def copier(self, hold: Hold) -> Copy:
        return bounced(hold, copy_here)

    async def reach(self, region: RegionInfo) -> bool:
        async with self._mapping:
            if region.shared and region.id not in self._maps:
                self._maps[region.id] = await self._map_region(region.id, region.nbytes)
        return region.shared

    def base(self, region: RegionInfo) -> tuple[int, object]:
        array = self._maps[region.id]
        return address_of(array), array

    def lifeline(self, region_ids: Sequence[int]) -> bytes:
        if self._process is not None and not self._process.alive:
            raise ProcessLookupError("the process has ended")
        parts = lifeline_parts(region_ids)
        return b"".join(self._lifeline[offset : offset + size].tobytes() for offset, size in parts)

    def forget(self, region_id: int) -> None:
        # A copy that still runs keeps the array, so the map stays until it is through.
        self._maps.pop(region_id, None)

    def close(self) -> None:
        self._maps.clear()
        if self._process is not None:
            self._process.close()
