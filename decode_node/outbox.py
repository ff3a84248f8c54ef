"""Tokens on their way to the conductors: one message a step for each, or a few short steps in one."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable

from moonpool.protos import node_pb2

# A message costs either end about 0.1 ms of its event loop, a third of a small model's step. So steps that
# follow each other faster than this share one; nobody who reads notices. Longer steps have one each.
INTERVAL_S = 0.003


class Outbox:
    """What one conductor is to be told, and since when nobody has been listening. For one event loop."""

    def __init__(
        self, clock: Callable[[], float], describe_load: Callable[[node_pb2.StepTokens], None]
    ) -> None:
        """``describe_load`` fills in how busy the node is, when a message is about to go."""
        self._clock = clock
        self._describe_load = describe_load
        self._loop = asyncio.get_running_loop()
        self._messages: deque[node_pb2.StepTokens] = deque()
        self._held: list[node_pb2.TokenOut] = []  # not in a message yet
        self._num_held_steps = 0
        self._due_s = 0.0  # of the loop's clock: when the next step's message may go
        self._timer: asyncio.TimerHandle | None = None
        self._news = asyncio.Event()
        self._reader = 0  # the latest stream; an older one that still lingers ends
        self._unread_since_s: float | None = clock()

    def put_step(self, tokens: list[node_pb2.TokenOut]) -> None:
        """Send what a step produced, or at most ``INTERVAL_S`` later together with the steps that follow it.

        What ends a request goes at once.
        """
        self._held += tokens
        self._num_held_steps += 1
        ends = any(token.finish_reason for token in tokens)
        if ends or self._loop.time() >= self._due_s:
            self._send()
        elif self._timer is None:
            self._timer = self._loop.call_at(self._due_s, self._send)

    def put(self, token: node_pb2.TokenOut) -> None:
        """Send news that is not of a step, with the next step's message or ``INTERVAL_S`` later by itself.

        It does not delay that message.
        """
        self._held.append(token)
        if self._timer is None:
            self._timer = self._loop.call_later(INTERVAL_S, self._send)

    def _send(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._num_held_steps:
            self._due_s = self._loop.time() + INTERVAL_S
        message = node_pb2.StepTokens(tokens=self._held, num_steps=self._num_held_steps)
        self._describe_load(message)
        self._held, self._num_held_steps = [], 0
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
