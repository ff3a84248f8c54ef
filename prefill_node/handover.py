"""Handover of one request's blocks to a decode node: finished blocks, sent blocks, the end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from moonpool.engine.batching.sequence import Sequence
from moonpool.engine.memory.block_memory import BlockMemory
from moonpool.protos import node_pb2
from moonpool.runtime.errors import MoonpoolError


class HandoverFailed(MoonpoolError):
    """The followed prefill was cancelled or failed."""

    code = "ABORTED"


class Handover:
    """Announces a sequence's blocks to its follower as the engine finishes them.

    Either side may start first. The prefill calls ``progress`` and ``finish``; the follower reads ``chunks``
    once.
    """

    def __init__(self, memory: BlockMemory, source: node_pb2.KvAddress) -> None:
        self._memory = memory
        self._source = source
        self._sequence: Sequence | None = None
        self._num_tokens = 0
        self._token: node_pb2.TokenOut | None = None
        self._failure = ""
        self._news = asyncio.Event()
        self.followed = asyncio.Event()  # a follower has connected
        self.taken = asyncio.Event()  # it has read everything, or disconnected

    def progress(self, sequence: Sequence, num_tokens: int) -> None:
        """Announce that the KV of the first ``num_tokens`` tokens is complete."""
        self._sequence, self._num_tokens = sequence, num_tokens
        self._news.set()

    def finish(self, sequence: Sequence, token: node_pb2.TokenOut) -> None:
        """Announce that all KV is complete, and the next token."""
        self._token = token
        self.progress(sequence, sequence.num_computed_tokens)

    def fail(self, reason: str) -> None:
        """End the handover with an error."""
        self._failure = reason
        self._news.set()

    async def chunks(self) -> AsyncIterator[node_pb2.KvChunk]:
        """Yield finished blocks in order, as many as there are in each message, up to the last one.

        Raises HandoverFailed when the prefill fails.
        """
        num_sent = 0
        while True:
            await self._news.wait()
            self._news.clear()
            if self._failure:
                raise HandoverFailed(self._failure)
            chunk = await self._next(num_sent)
            num_sent += len(chunk.blocks.offset)
            if chunk.blocks.offset or chunk.last:
                yield chunk
            if chunk.last:
                return

    async def _next(self, num_sent: int) -> node_pb2.KvChunk:
        sequence = self._sequence
        assert sequence is not None
        block_size = self._memory.layout.block_size
        # Read both now: they may change during the await below.
        num_tokens, token = self._num_tokens, self._token
        # A block that is not full will change, unless the prefill has ended.
        num_complete = num_tokens // block_size if token is None else -(-num_tokens // block_size)
        return node_pb2.KvChunk(
            first_block=num_sent,
            blocks=await self._memory.describe(sequence.block_table[num_sent:num_complete]),
            num_tokens=num_tokens,
            last=token is not None,
            token=token,
            source=self._source if num_sent == 0 else None,
        )
