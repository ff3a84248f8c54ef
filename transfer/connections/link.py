"""The link of a ``Peer`` to its agent: a control connection, or an object within one process."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass, field

from moonpool.transfer.connections.control import Control
from moonpool.transfer.connections.handshake import Identity
from moonpool.transfer.connections.notification import Notification, Notifications
from moonpool.transfer.connections.wire import RegionInfo
from moonpool.transfer.memory.region import RegionTable
from moonpool.transfer.memory.write_grants import WriteGrants


@dataclass(slots=True, eq=False)
class LocalAgent:
    """An agent as other agents of its process see it. links: those that lead to it."""

    identity: Identity
    loop: asyncio.AbstractEventLoop
    regions: RegionTable
    grants: WriteGrants
    region_info: Callable[[int], RegionInfo]
    notes: Notifications
    links: set[LocalLink] = field(default_factory=set)

    @property
    def key(self) -> tuple[int, bytes]:
        """The process and the incarnation: a forked child has copies of these objects, but no agents."""
        return os.getpid(), self.identity.incarnation


AGENTS: dict[tuple[int, bytes], LocalAgent] = {}
"""The open agents of this process, by ``LocalAgent.key``."""


class LocalLink:
    """Replaces ``Control`` for an agent of this process, which may run on another event loop."""

    def __init__(
        self, here: LocalAgent, there: LocalAgent, on_lost: Callable[[LocalLink, str], None]
    ) -> None:
        self._here = here
        self._there = there
        self._on_lost = on_lost
        self._on_region_closed: list[Callable[[int], None]] = []
        there.links.add(self)

    @property
    def open(self) -> bool:
        return self._there.key in AGENTS

    async def region(self, region_id: int) -> RegionInfo:
        return self._there.region_info(region_id)

    def note(self, payload: bytes) -> None:
        note = Notification(self._here.identity.agent_id, self._here.identity.epoch, bytes(payload))
        self._there.loop.call_soon_threadsafe(self._there.notes.put, note)

    def on_region_closed(self, callback: Callable[[int], None]) -> None:
        self._on_region_closed.append(callback)

    def release_region(self, region_id: int) -> None:
        """Does nothing: closing a region of this process waits for its readers."""

    def region_closed(self, region_id: int) -> None:
        """The other agent closed one of its regions. Called on its thread."""
        for callback in self._on_region_closed:
            self._here.loop.call_soon_threadsafe(callback, region_id)

    def lost(self) -> None:
        """The other agent was closed. Called on its thread."""
        self._here.loop.call_soon_threadsafe(self._on_lost, self, "its agent was closed")

    def close(self) -> None:
        self._there.links.discard(self)


Link = Control | LocalLink
