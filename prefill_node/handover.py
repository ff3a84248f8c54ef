"""Handover of one request's blocks to a decode node: finished blocks, sent blocks, the end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from moonpool.engine.batching.sequence import Sequence
from moonpool.engine.memory.block_memory import BlockMemory
from moonpool.kvstore.blocks.tier import Tier
from moonpool.kvstore.grants.table import Grant, GrantTable
from moonpool.protos import node_pb2
from moonpool.runtime.errors import MoonpoolError


class HandoverFailed(MoonpoolError):
    """The followed prefill was cancelled or failed."""

    code = "ABORTED"


class Handover:
    """Announces a sequence's blocks to its follower as the engine finishes them.

    Either side may start first. The prefill calls ``progress`` and ``finish``; the follower reads ``chunks``
    once. Announced blocks are granted to it: they stay when the sequence is preempted, aborted or released.
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
        self.progress(sequence, sequence.num_computed_tokens)

    def fail(self, reason: str, kind: type[MoonpoolError] = HandoverFailed) -> None:
        """End the handover with an error. Only the first call counts."""
        self._failure = self._failure or kind(reason)
        self._news.set()

    def renew(self) -> None:
        """Prolong the grants of open streams. Call it more often than every ``ttl_s``."""
        for grant in self._followed:
            self._grants.renew(grant.id, self._ttl_s)

    async def chunks(self, follower: str) -> AsyncGenerator[node_pb2.KvChunk]:
        """Yield finished blocks in order, as many as there are in each message, up to the last one.

        Raises HandoverFailed, or the kind of error given to ``fail``, when the prefill fails. The grant of
        the blocks outlives the iteration.
        """
        asked_s = self._grants.now_s()
        blocks: list[int] = []
        grant = self._grants.grant(
            f"follower {follower}", [], self._ttl_s, lambda _: self._memory.pool.release(blocks)
        )
        self._followed.append(grant)
        try:
            while True:
                await self._news.wait()
                self._news.clear()
                if self._failure:
                    raise self._failure
                chunk = await self._next(blocks, grant)
                chunk.granted_s = grant.expires_s - asked_s
                if chunk.blocks.offset or chunk.last:
                    yield chunk
                if chunk.last:
                    # The follower ends the call when it has read the last blocks.
                    await self.taken.wait()
                    return
        finally:
            self._followed.remove(grant)
            if not blocks:
                self._grants.release(grant.id)

    async def _next(self, sent: list[int], grant: Grant) -> node_pb2.KvChunk:
        """``sent``: the blocks announced so far; the next ones are added, and granted."""
        sequence = self._sequence
        assert sequence is not None
        block_size = self._memory.layout.block_size
        # Read both now: they may change during the await below.
        num_tokens, token = self._num_tokens, self._token
        # A block that is not full will change, unless the prefill has ended.
        num_complete = num_tokens // block_size if token is None else -(-num_tokens // block_size)
        num_sent, pool = len(sent), self._memory.pool
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
            last=token is not None,
            token=token,
            source=self._source if num_sent == 0 else None,
            lease_id=grant.id,
        )
