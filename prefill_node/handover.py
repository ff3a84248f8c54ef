"""One request's blocks on their way to a decode node: what is finished, what was sent, until it was taken."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from moonpool.engine.batching.sequence import Sequence
from moonpool.engine.memory.block_memory import BlockMemory
from moonpool.protos import node_pb2
from moonpool.runtime.errors import MoonpoolError


class HandoverFailed(MoonpoolError):
    """The prefill a decode node follows was cancelled or failed: its blocks will not come."""

    code = "ABORTED"


class Handover:
    """Announces a sequence's blocks to its follower as the engine finishes them.

    Either side may come first. ``progress`` and ``finish`` are called by the prefill, ``chunks`` is read by
    the follower, once.
    """

    def __init__(self, memory: BlockMemory, source: node_pb2.KvAddress) -> None:
        self._memory = memory
        self._source = source
        self._sequence: Sequence | None = None
        self._num_tokens = 0
        self._token: node_pb2.TokenOut | None = None
        self._failure = ""
        self._news = asyncio.Event()
        self.followed = asyncio.Event()  # a follower is there
        self.taken = asyncio.Event()  # it has read everything, or is gone

    def progress(self, sequence: Sequence, num_tokens: int) -> None:
        """The KV of the first ``num_tokens`` tokens is complete in the blocks of ``sequence``."""
        self._sequence, self._num_tokens = sequence, num_tokens
        self._news.set()

    def finish(self, sequence: Sequence, token: node_pb2.TokenOut) -> None:
        """All of it is complete, and this is the token that follows."""
        self._token = token
        self.progress(sequence, sequence.num_computed_tokens)

    def fail(self, reason: str) -> None:
        """There will be no more."""
        self._failure = reason
        self._news.set()

    async def chunks(self) -> AsyncIterator[node_pb2.KvChunk]:
        """Blocks in order, each once, all that are finished in one message; ends after the last one.

        Raises HandoverFailed when the prefill ended without.
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
        # Both as they are now: there may be news while the blocks are described.
        num_tokens, token = self._num_tokens, self._token
        # A block that is not full yet will change, unless nothing follows.
        num_complete = num_tokens // block_size if token is None else -(-num_tokens // block_size)
        return node_pb2.KvChunk(
            first_block=num_sent,
            blocks=await self._memory.describe(sequence.block_table[num_sent:num_complete]),
            num_tokens=num_tokens,
            last=token is not None,
            token=token,
            source=self._source if num_sent == 0 else None,
        )
