"""A node as the index sees one: it holds blocks and tells a publisher."""

from __future__ import annotations

import asyncio

from moonpool.kvstore.blocks.keys import BlockKey
from moonpool.kvstore.blocks.tier import Tier
from moonpool.kvstore.index.node_publisher import IndexPublisher
from moonpool.kvstore.index.redis.kv_index import KVIndex
from moonpool.kvstore.index.redis.node_record import NodeRecord
from moonpool.runtime.config.options import IndexOptions


def key(number: int, chain: int = 0) -> BlockKey:
    return BlockKey(chain.to_bytes(8, "big") + number.to_bytes(8, "big"))


def chain(length: int, number: int = 0) -> list[BlockKey]:
    return [key(block, number) for block in range(length)]


def next_batch(index: KVIndex, node_id: str, changes: bytes) -> bytes:
    """The next batch in the log of a node that ``index`` has registered, as it stands in Redis."""
    own = index._registered[node_id]
    return index._entries.batch(own, own.position, changes)


class FakeNode:
    """Holds chains up to some length, as a real node would, and publishes them through the real publisher.

    ``lease_ttl_s``: so long that no heartbeat replaces by itself what a test has written to its record.
    """

    def __init__(self, index: KVIndex, node_id: str, epoch: int = 1, lease_ttl_s: float = 60.0) -> None:
        self.record = NodeRecord(node_id, epoch, "prefill")
        self.held: dict[BlockKey, Tier] = {}
        options = IndexOptions(lease_ttl_s=lease_ttl_s, publish_interval_s=0.001)
        self.publisher = IndexPublisher(index, lambda: self.record, options, lambda: self.held.items())

    async def start(self) -> FakeNode:
        await self.publisher.start()
        return self

    def hold(self, length: int, number: int = 0, tier: Tier = Tier.POOL) -> None:
        """Hold exactly ``length`` blocks of a chain; what goes, goes leaf first."""
        mine = {k for k in self.held if k[:8] == key(0, number)[:8]}
        for block in sorted(mine - set(chain(length, number)), reverse=True):
            del self.held[block]
            self.publisher.removed(block)
        for block in chain(length, number):
            self.held[block] = tier
            self.publisher.stored(block, tier)

    async def settled(self) -> None:
        """Redis has answered since this call, and everything held is published."""
        self.publisher.announce()
        await self.publisher.flush()

    async def kill(self) -> None:
        """As kill -9: no more heartbeats, no farewell."""
        task, self.publisher._task = self.publisher._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
