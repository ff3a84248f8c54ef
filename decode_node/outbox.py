"""Messages with tokens to the conductors: one per step, or one for several short steps."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable

from moonpool.protos import node_pb2

# A message costs either event loop about 0.1 ms, a third of a small model's step. Steps within this interval
# use one message.
INTERVAL_S = 0.003


class Outbox:
    """Unread messages for one conductor. For one event loop."""

    def __init__(
        self, clock: Callable[[], float], describe_load: Callable[[node_pb2.StepTokens], None]
    ) -> None:
        """``describe_load`` adds the node's load to each message."""
        self._clock = clock
        self._describe_load = describe_load
        self._loop = asyncio.get_running_loop()
        self._messages: deque[node_pb2.StepTokens] = deque()
        self._unsent: list[node_pb2.TokenOut] = []  # tokens for the next message
        self._num_unsent_steps = 0
        self._due_s = 0.0  # by the loop's clock: earliest time of the next step's message
        self._timer: asyncio.TimerHandle | None = None
        self._news = asyncio.Event()
        self._reader = 0  # number of the current stream; older ones end
        self._unread_since_s: float | None = clock()

    def put_step(self, tokens: list[node_pb2.TokenOut]) -> None:
        """Send a step's tokens, at most ``INTERVAL_S`` later together with following steps. A token that
        ends a request is sent at once."""
        self._unsent += tokens
        self._num_unsent_steps += 1
        ends = any(token.finish_reason for token in tokens)
        if ends or self._loop.time() >= self._due_s:
            self._send()
        elif self._timer is None:
            self._timer = self._loop.call_at(self._due_s, self._send)

    def put(self, token: node_pb2.TokenOut) -> None:
        """Send a token outside a step: with the next message, at most ``INTERVAL_S`` later."""
        self._unsent.append(token)
        if self._timer is None:
            self._timer = self._loop.call_later(INTERVAL_S, self._send)

    def _send(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._num_unsent_steps:
            self._due_s = self._loop.time() + INTERVAL_S
        message = node_pb2.StepTokens(tokens=self._unsent, num_steps=self._num_unsent_steps)
        self._describe_load(message)
        self._unsent, self._num_unsent_steps = [], 0
        self._messages.append(message)
        self._news.set()

    @property
    def unread_s(self) -> float:
        """Seconds without an open stream; 0 with one."""
        return 0.0 if self._unread_since_s is None else self._clock() - self._unread_since_s

    async def messages(self) -> AsyncIterator[node_pb2.StepTokens]:
        """Yield messages for ever, beginning with the unread ones. A new reader ends the one before."""
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
