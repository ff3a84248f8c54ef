"""Loads an adapter on all ranks of an engine, beside its steps: from the store, a peer, or its files."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from moonpool.engine.adapters.pages import AdapterPages
from moonpool.engine.adapters.residency import AdapterRef
from moonpool.engine.adapters.shapes import AdapterKeys, AdapterShape, AdapterShapes
from moonpool.engine.ranks.process_handle import RankProcess
from moonpool.engine.sharding.parallel_plan import Shard
from moonpool.kvstore.blocks.keys import BlockKey
from moonpool.kvstore.blocks.tier import Tier
from moonpool.protos import node_pb2

FromStore = Callable[[Sequence[BlockKey], Sequence[int]], Awaitable[Sequence[Tier]]]
"""``TierLoader.fill_whole``: blocks of the pool, filled on all ranks; the tiers they came from, or none."""

FromPeer = Callable[[node_pb2.KvAddress, Sequence[BlockKey], Sequence[int]], Awaitable[bool]]
"""``PeerExchange.fill_whole``: the same of a peer's blocks."""

FILE, PEER = "file", "peer"
"""Sources of loads; the others are names of tiers."""


class AdapterLoader:
    """See ``residency.Loader``. Set ``from_store`` to find adapters in a store, and to key their blocks for
    it; and ``from_peer`` to find them in those of other nodes."""

    def __init__(
        self,
        pages: AdapterPages,
        shapes: AdapterShapes,
        keys: AdapterKeys | None,
        ranks: Sequence[RankProcess],
        shards: Sequence[Shard],
        reader: ThreadPoolExecutor,
    ) -> None:
        """pages: rank 0's; ranks: the others; shards: of all; keys: None where a store cannot have
        the blocks; reader: the thread that reads files here."""
        self.from_store: FromStore | None = None
        self.from_peer: FromPeer | None = None
        self._pages, self._shapes, self._keys = pages, shapes, keys
        self._ranks, self._shards, self._reader = ranks, shards, reader

    async def num_blocks(self, ref: AdapterRef) -> int:
        """See ``residency.Loader``. Each cp rank has the whole adapter in its own blocks."""
        return (await self._shape(ref)).num_blocks * self._shards[0].cp

    def keys(self, ref: AdapterRef) -> list[BlockKey]:
        """See ``residency.Loader``."""
        shape = self._shapes.get(ref.digest)
        if shape is None or self._keys is None or self.from_store is None:
            return []
        return self._keys.chain(ref.digest, shape.num_blocks)

    async def load(self, ref: AdapterRef, number: int, block_ids: Sequence[int]) -> str:
        """See ``residency.Loader``. Returns when every rank has the adapter, or raises when all have ended
        their try."""
        shape = await self._shape(ref)
        source = await self._bring(ref, block_ids)
        of_ranks = [
            [block // shard.cp for block in block_ids if block % shard.cp == shard.cp_rank]
            for shard in self._shards
        ]

        def place() -> None:
            if source == FILE:
                self._pages.load(ref.path, ref.digest, shape.ranks, number, of_ranks[0])
            else:
                self._pages.place(shape.ranks, number, of_ranks[0])

        own = asyncio.get_running_loop().run_in_executor(self._reader, place)
        files = (ref.path, ref.digest) if source == FILE else None
        ranks = shape.ranks.tolist()
        others = (rank.load_adapter(ranks, number, of_ranks[rank.rank], files) for rank in self._ranks)
        for result in await asyncio.gather(own, *others, return_exceptions=True):
            if isinstance(result, BaseException):
                raise result
        return source

    async def _shape(self, ref: AdapterRef) -> AdapterShape:
        known = self._shapes.get(ref.digest)
        if known is None:
            read = asyncio.get_running_loop().run_in_executor
            known = await read(self._reader, self._shapes.read, ref.path, ref.digest)
        assert known.ranks.max() == ref.rank, "the digest names another rank"
        return known

    async def _bring(self, ref: AdapterRef, block_ids: Sequence[int]) -> str:
        """Fill the blocks from where all of them are. Return the slowest tier, PEER, or FILE: nowhere."""
        keys = self.keys(ref)
        if self.from_store is None or not keys:
            return FILE
        tiers = await self.from_store(keys, block_ids)
        if len(tiers) == len(keys):
            return max(tiers).name.lower()
        if self.from_peer is not None and ref.peer is not None:
            return PEER if await self.from_peer(ref.peer, keys, block_ids) else FILE
        return FILE
