"""Closed regions whose memory must stay, because peers may still be reading it without asking."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from moonpool.transfer.connections.control import Control
from moonpool.transfer.memory.region import Region


class Lingering:
    """Over TCP and shared memory UCX answers a read by copying from the address it was given, whatever lies
    there by then; and device memory may not be freed while another process has it mapped.

    So such a region is kept until every peer has said that it reads it no more, or is gone.
    """

    def __init__(self, forget: Callable[[int], None]) -> None:
        """``forget(region id)`` when nobody reads it any more."""
        self._forget = forget
        self._regions: dict[int, tuple[Region, set[Control]]] = {}
        self._changed = asyncio.Event()

    def __len__(self) -> int:
        return len(self._regions)

    def add(self, region: Region, peers: set[Control]) -> None:
        """``peers``: who was just told, and will answer."""
        self._regions[region.id] = (region, peers)
        self._free_unread()

    def let_go(self, peer: Control, region_id: int) -> None:
        if region_id in self._regions:
            self._regions[region_id][1].discard(peer)
            self._free_unread()

    def gone(self, peer: Control) -> None:
        """Its connection has ended."""
        for _, peers in self._regions.values():
            peers.discard(peer)
        self._free_unread()

    async def on_devices_gone(self, seconds: float) -> list[Region]:
        """Wait until no peer reads regions in device memory. Returns those it reads after ``seconds``."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self._on_devices():
                    self._changed.clear()
                    await self._changed.wait()
        return self._on_devices()

    def _on_devices(self) -> list[Region]:
        return [region for region, _ in self._regions.values() if region.device is not None]

    def _free_unread(self) -> None:
        for region_id in [region_id for region_id, (_, peers) in self._regions.items() if not peers]:
            del self._regions[region_id]
            self._forget(region_id)
            self._changed.set()
