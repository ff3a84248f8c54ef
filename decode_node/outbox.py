"""Tokens on their way to the conductors: one message a step for each, or a few short steps in one."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable

from protos import node_pb2

# A message costs either end about 0.1 ms of its event loop, a third of a small model's step. So steps that
# follow each other faster than this share one; nobody who reads notices. Longer steps have one each.
INTERVAL_S = 0.002


class Outbox:
    """What one conductor is to be told, and since when nobody has been listening. For one event loop."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._messages: deque[node_pb2.StepTokens] = deque()
        self._held: node_pb2.StepTokens | None = None  # waits for the steps after it
        self._due_s = 0.0  # of the loop's clock: when the next message may go
        self._timer: asyncio.TimerHandle | None = None
        self._news = asyncio.Event()
        self._reader = 0  # the latest stream; an older one that still lingers ends
        self._unread_since_s: float | None = clock()

    def put(self, message: node_pb2.StepTokens) -> None:
        """Send the message, or at most ``INTERVAL_S`` later together with those that follow it.

        What ends a request, and what is not of a step (``num_steps`` 0), goes at once.
        """
        if self._held is not None:
            message = _joined(self._held, message)
            self._held = None
        urgent = message.num_steps == 0 or any(token.finish_reason for token in message.tokens)
        if urgent or self._loop.time() >= self._due_s:
            self._send(message)
            return
        self._held = message
        if self._timer is None:
            self._timer = self._loop.call_at(self._due_s, self._send_held)

    def _send_held(self) -> None:
        self._timer = None
        if self._held is not None:
            message, self._held = self._held, None
            self._send(message)

    def _send(self, message: node_pb2.StepTokens) -> None:
        self._due_s = self._loop.time() + INTERVAL_S
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
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


def _joined(first: node_pb2.StepTokens, then: node_pb2.StepTokens) -> node_pb2.StepTokens:
    """One message for both; its load is the later one's."""
    first.tokens.extend(then.tokens)
    first.num_steps += then.num_steps
    first.num_running = then.num_running
    first.num_waiting = then.num_waiting
    first.num_free_blocks = then.num_free_blocks
    return first
