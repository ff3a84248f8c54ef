"""Notes from peers: small messages, in order for each peer, read with ``async for``."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

MAX_WAITING = 16_384
MAX_WAITING_NBYTES = 32 << 20
"""Limits of unread notes; beyond either, peers have to wait."""


@dataclass(frozen=True, slots=True)
class Notification:
    """A note, from the agent ``agent_id``."""

    agent_id: str
    epoch: int
    payload: bytes


class Notifications:
    """Received notes. One reader at a time; iteration ends when the agent is closed."""

    def __init__(self) -> None:
        self._waiting: deque[Notification] = deque()
        self._nbytes = 0
        self._arrived = asyncio.Event()
        self._stalled: set[Callable[[], None]] = set()
        self._closed = False

    def put(self, note: Notification) -> None:
        self._waiting.append(note)
        self._nbytes += len(note.payload)
        self._arrived.set()

    @property
    def full(self) -> bool:
        return self._beyond(1)

    def _beyond(self, divisor: int) -> bool:
        waiting, nbytes = len(self._waiting) * divisor, self._nbytes * divisor
        return waiting >= MAX_WAITING or nbytes >= MAX_WAITING_NBYTES

    def when_drained(self, resume: Callable[[], None]) -> None:
        """Call ``resume`` once when there is room again."""
        self._stalled.add(resume)

    def close(self) -> None:
        self._closed = True
        self._arrived.set()

    def __aiter__(self) -> Notifications:
        return self

    async def __anext__(self) -> Notification:
        while not self._waiting:
            if self._closed:
                raise StopAsyncIteration
            self._arrived.clear()
            await self._arrived.wait()
        note = self._waiting.popleft()
        self._nbytes -= len(note.payload)
        if self._stalled and not self._beyond(2):
            stalled, self._stalled = self._stalled, set()
            for resume in stalled:
                resume()
        return note
