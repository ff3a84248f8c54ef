"""Handover of one request's blocks to a decode node, while another node computes or decodes it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import numpy as np

from moonpool.engine.batching.sequence import Sequence
from moonpool.engine.memory.block_memory import BlockMemory
from moonpool.kvstore.blocks.tier import Tier
from moonpool.kvstore.grants.table import Grant, GrantTable
from moonpool.protos import node_pb2
from moonpool.runtime.errors import MoonpoolError
from moonpool.runtime.failures import FailureClass

# Blocks of one message: a checksum of as many costs the event loop a millisecond or two.
_MAX_BLOCKS = 64


class HandoverFailed(MoonpoolError):
    """The followed request was cancelled or failed, or cannot be handed over now."""

    code = "ABORTED"
    failure = FailureClass.TRANSFER

    def __init__(self, why: str, failure: FailureClass = FailureClass.TRANSFER) -> None:
        """``failure``: of the request's own error."""
        super().__init__(why)
        self.failure = failure


class Handover:
    """Announces a sequence's blocks to its follower as the engine finishes them.

    Either side may start first. The engine's side calls ``progress``, and ``finish`` or ``stand_still``; the
    follower reads ``chunks`` once. Announced blocks are granted to it: they stay when the sequence is
    preempted, aborted or released.
    """

    def __init__(
        self, memory: BlockMemory, source: node_pb2.KvAddress, grants: GrantTable, *, ttl_s: float
    ) -> None:
        """``ttl_s``: longest that a follower is not heard of."""
        self._memory = memory
        self._source = source
        self._grants = grants
        self._ttl_s = ttl_s
        self._followed: list[Grant] = []  # of the streams that are open
        self._sequence: Sequence | None = None
        self._num_tokens = 0
        self._token: node_pb2.TokenOut | None = None
        self._complete = False
        self._failure: MoonpoolError | None = None
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
        self.stand_still(sequence)

    def stand_still(self, sequence: Sequence) -> None:
        """Announce that all KV is complete, and that the sequence does not change any more."""
        self._complete = True
        self.progress(sequence, sequence.num_computed_tokens)

    def fail(self, failure: MoonpoolError) -> None:
        """End the handover with an error. Only the first call counts."""
        self._failure = self._failure or failure
        self._news.set()

    def renew(self) -> None:
        """Prolong the grants of open streams. Call it more often than every ``ttl_s``."""
        for grant in self._followed:
            self._grants.renew(grant.id, self._ttl_s)

    async def finished(self) -> tuple[Sequence, node_pb2.TokenOut]:
        """Wait for the end of the prefill, for a follower on the same node. Raises as ``chunks``."""
        while self._token is None and not self._failure:
            await self._news.wait()
            self._news.clear()
        if self._failure:
            raise self._failure
        assert self._sequence is not None and self._token is not None
        return self._sequence, self._token

    async def chunks(
        self, follower: str, num_known_tokens: int | None = None
    ) -> AsyncGenerator[node_pb2.KvChunk]:
        """Yield finished blocks in order, as many as there are in each message, up to the last one.

        ``num_known_tokens``: of a sequence that decodes, the leading tokens that the follower knows. Each
        chunk has those that came after, and the first one is sent even without a block.

        Raises HandoverFailed, or another error given to ``fail``, when the request fails. The grant of
        the blocks outlives the iteration.
        """
        asked_s = self._grants.now_s()
        blocks: list[int] = []
        grant = self._grants.grant(
            f"follower {follower}", [], self._ttl_s, lambda _: self._memory.pool.release(blocks)
        )
        self._followed.append(grant)
        started = False
        try:
            while True:
                await self._news.wait()
                self._news.clear()
                if self._failure:
                    raise self._failure
                chunk = await self._next(blocks, grant, num_known_tokens)
                chunk.granted_s = grant.expires_s - asked_s
                if chunk.blocks.offset or chunk.last or (num_known_tokens is not None and not started):
                    started = True
                    num_known_tokens = num_known_tokens and num_known_tokens + len(chunk.token_ids) // 4
                    yield chunk
                if chunk.last:
                    # The follower ends the call when it has read the last blocks.
                    await self.taken.wait()
                    return
        finally:
            self._followed.remove(grant)
            if not blocks:
                self._grants.release(grant.id)

    async def _next(self, sent: list[int], grant: Grant, num_known_tokens: int | None) -> node_pb2.KvChunk:
        """``sent``: the blocks announced so far; the next ones are added, and granted."""
        sequence = self._sequence
        assert sequence is not None
        block_size = self._memory.layout.block_size
        # Read now: they may change during the await below. A sequence that was preempted since its last
        # progress has fewer tokens, in other blocks.
        num_tokens = min(self._num_tokens, sequence.num_computed_tokens)
        token, last = self._token, self._complete
        token_ids = b""
        if num_known_tokens is not None:
            token_ids = np.ascontiguousarray(sequence.token_ids[num_known_tokens:], "<i4").tobytes()
        # A block that is not full will change, unless the sequence stands still.
        num_complete = -(-num_tokens // block_size) if last else num_tokens // block_size
        num_sent, pool = len(sent), self._memory.pool
        if num_known_tokens is not None and num_complete > num_sent + _MAX_BLOCKS:
            # The prompt's blocks, all at once: they are announced in parts, so that steps go on in between.
            num_complete = num_sent + _MAX_BLOCKS
            num_tokens, last = num_complete * block_size, False
            self._news.set()
        blocks = sequence.block_table[num_sent:num_complete]
        pool.acquire(blocks)
        sent += blocks
        if not self._grants.renew(grant.id, self._ttl_s):
            pool.release(blocks)
            raise HandoverFailed("the follower's grant has ended")
        self._grants.extend(grant, [(Tier.POOL, block) for block in blocks])
        return node_pb2.KvChunk(
            first_block=num_sent,
            blocks=await self._memory.describe(blocks),
            num_tokens=num_tokens,
            last=last,
            token=token if last else None,
            token_ids=token_ids,
            source=self._source if num_sent == 0 else None,
            lease_id=grant.id,
        )
