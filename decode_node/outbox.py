"""Tokens on their way to the conductors: one message a step for each."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable

from protos import node_pb2


class Outbox:
    """What one conductor is to be told, and since when nobody has been listening."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._messages: deque[node_pb2.StepTokens] = deque()
        self._news = asyncio.Event()
        self._reader = 0  # the latest stream; an older one that still lingers ends
        self._unread_since_s: float | None = clock()

    def put(self, message: node_pb2.StepTokens) -> None:
        self._messages.append(message)
        self._news.set()

    @property
    def unread_s(self) -> float:
        """For how long no stream has been open; 0 while one is."""
        return 0.0 if self._unread_since_s is None else self._clock() - self._unread_since_s

    async def messages(self) -> AsyncIterator[node_pb2.StepTokens]:
        """Everything that was put and not yet read, for ever. A new reader ends the one before."""
        self._reader += 1
        me = self._reader
        self._unread_since_s = None
        self._news.set()
        try:
            while me == self._reader:
                while self._messages and me == self._reader:
                    yield self._messages.popleft()
                self._news.clear()
                await self._news.wait()
        finally:
            if me == self._reader:
                self._unread_since_s = self._clock()
