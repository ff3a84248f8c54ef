"""Closed regions that peers may still be reading."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Hashable

from moonpool.transfer.memory.region import Region


class ClosedRegions:
    """Keeps the memory of a closed region until every reader has released it or is gone.

    Over TCP and shared memory UCX copies from the address in the request, whatever that memory holds by then.
    Device memory must not be freed while another process has it mapped.
    """

    def __init__(self, forget: Callable[[int], None]) -> None:
        """``forget(region id)`` is called when the last reader has released it."""
        self._forget = forget
        self._regions: dict[int, tuple[Region, set[Hashable]]] = {}
        self._changed = asyncio.Event()

    def add(self, region: Region, readers: set[Hashable]) -> None:
        """``readers``: the peers that will call ``release``."""
        self._regions[region.id] = (region, readers)
        self._free_unread()

    def release(self, reader: Hashable, region_id: int) -> None:
        if region_id in self._regions:
            self._regions[region_id][1].discard(reader)
            self._free_unread()

    def forget_reader(self, reader: Hashable) -> None:
        """Its connection has ended."""
        for _, readers in self._regions.values():
            readers.discard(reader)
        self._free_unread()

    async def on_devices_released(self, seconds: float) -> list[Region]:
        """Wait until no peer reads regions in device memory. Returns those still read after ``seconds``."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self._on_devices():
                    self._changed.clear()
                    await self._changed.wait()
        return self._on_devices()

    def _on_devices(self) -> list[Region]:
        return [region for region, _ in self._regions.values() if region.device is not None]

    def _free_unread(self) -> None:
        for region_id in [region_id for region_id, (_, readers) in self._regions.items() if not readers]:
            del self._regions[region_id]
            self._forget(region_id)
            self._changed.set()
