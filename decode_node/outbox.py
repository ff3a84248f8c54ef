"""Messages with tokens to the conductors: one per step, or one for several short steps."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any

from moonpool.protos import node_pb2
from moonpool.runtime import rpc
from moonpool.runtime.errors import MoonpoolError

# Over gRPC a message costs either event loop some 50 µs, a part of a small model's step. Steps within this
# interval use one message.
INTERVAL_S = 0.003
# To a conductor of this host, over a Unix socket, it costs some µs. What is saved then is what the conductor
# and the kernel do once for all tokens of a message.
DIRECT_INTERVAL_S = 0.001
MAX_UNREAD_NBYTES = 16 << 20
"""Of messages that wait for one conductor: minutes of tokens, seconds of tokens with all logprobs."""


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
        self._mixed = False  # whether one of these computed a part of a prompt
        self._due_s = 0.0  # by the loop's clock: earliest time of the next step's message
        self._timer: asyncio.TimerHandle | None = None
        self._news = asyncio.Event()
        self._reader = 0  # number of the current stream; older ones end
        self._reading: asyncio.Task[Any] | None = None  # sends the current stream
        self._sending = False  # a message that its stream has not sent yet
        self._finished = False
        self._unread_since_s = clock()
        self.unread_nbytes = 0
        self.interval_s = INTERVAL_S  # as its reader's connection wants it

    def put_step(
        self, tokens: list[node_pb2.TokenOut], *, mixed: bool = False, at_once: bool = False
    ) -> None:
        """Send a step's tokens, at most ``interval_s`` later together with following steps. A token that
        ends a request is sent at once."""
        self._unsent += tokens
        self._num_unsent_steps += 1
        self._mixed |= mixed
        ends = any(token.finish_reason for token in tokens)
        if ends or at_once or self._loop.time() >= self._due_s:
            self._send()
        elif self._timer is None:
            self._timer = self._loop.call_at(self._due_s, self._send)

    def put(self, token: node_pb2.TokenOut) -> None:
        """Send a token outside a step: with the next message, at most ``interval_s`` later."""
        self._unsent.append(token)
        if self._timer is None:
            self._timer = self._loop.call_later(self.interval_s, self._send)

    def _send(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._num_unsent_steps:
            self._due_s = self._loop.time() + self.interval_s
        message = node_pb2.StepTokens(
            tokens=self._unsent, num_steps=self._num_unsent_steps, mixed=self._mixed
        )
        self._describe_load(message)
        self._unsent, self._num_unsent_steps, self._mixed = [], 0, False
        if not self._messages and not self._sending and self._reading is not None:
            self._unread_since_s = self._clock()
        self._messages.append(message)
        self.unread_nbytes += message.ByteSize()
        self._news.set()

    @property
    def unread_s(self) -> float:
        """Seconds since the conductor took a message or its stream ended; 0 where a stream has read all."""
        if self._reading is not None and not self._messages and not self._sending:
            return 0.0
        return self._clock() - self._unread_since_s

    @property
    def is_behind(self) -> bool:
        """Whether there is a stream that has not sent everything yet."""
        return self._reading is not None and bool(self._messages or self._unsent or self._sending)

    async def messages(self) -> AsyncIterator[node_pb2.StepTokens]:
        """Yield messages, the unread ones first, until ``finish``. A new reader ends the one before."""
        self._reader += 1
        me = self._reader
        self._reading, self._sending = asyncio.current_task(), False
        self._unread_since_s = self._clock()
        self._news.set()
        try:
            while me == self._reader:
                while self._messages and me == self._reader:
                    message = self._messages.popleft()
                    self.unread_nbytes -= message.ByteSize()
                    self._unread_since_s = self._clock()
                    self._sending = True
                    yield message
                    if me == self._reader:
                        self._sending = False
                if self._finished:
                    return
                self._news.clear()
                await self._news.wait()
        finally:
            if me == self._reader:
                self._reading, self._sending = None, False
                self._unread_since_s = self._clock()

    def finish(self) -> None:
        """Let streams end once they have sent what there is."""
        if self._unsent:
            self._send()
        self._finished = True
        self._news.set()

    def end(self, error: MoonpoolError) -> None:
        """Drop the unread messages, and end the stream with ``error``."""
        self._messages.clear()
        self.unread_nbytes = 0
        if self._timer is not None:
            self._timer.cancel()
        if self._reading is not None:
            rpc.end_stream(self._reading, error)
