"""The agents of this process, and how one reaches another without a connection."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from moonpool.transfer.connections.notification import Notification
from moonpool.transfer.connections.wire import RegionInfo

if TYPE_CHECKING:
    from moonpool.transfer.agent import TransferAgent

AGENTS: dict[tuple[int, bytes], TransferAgent] = {}
"""By process and incarnation: a forked child has a copy of them, but not the agents. From start to close."""


class LocalLink:
    """A ``Link`` to an agent of this process, which may live on another thread's event loop."""

    def __init__(
        self, here: TransferAgent, there: TransferAgent, on_lost: Callable[[LocalLink], None]
    ) -> None:
        self._here = here
        self._there = there
        self._on_lost = on_lost
        self._on_region_closed: list[Callable[[int], None]] = []
        there.memory.local_links.add(self)

    @property
    def open(self) -> bool:
        return (os.getpid(), self._there.incarnation) in AGENTS

    async def region(self, region_id: int) -> RegionInfo:
        return self._there.region_info(region_id)

    def note(self, payload: bytes) -> None:
        note = Notification(self._here.agent_id, self._here.epoch, bytes(payload))
        self._there.loop.call_soon_threadsafe(self._there.notes.put, note)

    def on_region_closed(self, callback: Callable[[int], None]) -> None:
        self._on_region_closed.append(callback)

    def let_go(self, region_id: int) -> None:
        """Nothing to tell: a region of this process is closed when nobody reads it."""

    def region_closed(self, region_id: int) -> None:
        """The other agent closed one of its regions. From its thread."""
        for callback in self._on_region_closed:
            self._here.loop.call_soon_threadsafe(callback, region_id)

    def lost(self) -> None:
        """The other agent was closed. From its thread."""
        self._here.loop.call_soon_threadsafe(self._on_lost, self)

    def close(self) -> None:
        self._there.memory.local_links.discard(self)
