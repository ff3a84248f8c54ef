"""Cached blocks of a node by tenant, and the tenants' quotas."""

from __future__ import annotations

from collections.abc import Sequence

from moonpool.engine.memory.block_memory import BlockMemory
from moonpool.kvstore.blocks.keys import BlockKey
from moonpool.kvstore.blocks.tier import Tier
from moonpool.kvstore.eviction.tenant_quota import TenantQuotas
from moonpool.kvstore.store import TieredStore
from moonpool.protos import node_pb2


class TenantCache:
    """Counts cached blocks by tenant, and evicts those beyond a tenant's quota. One per node."""

    def __init__(self, memory: BlockMemory) -> None:
        self.quotas = TenantQuotas(memory.layout.block_nbytes)
        self._pool = memory.pool

    def on_tier_change(self, key: BlockKey, tier: Tier | None) -> None:
        """Note the tier of a block's fastest copy; None: no copy is left."""
        if tier is None:
            self.quotas.gone(key)
        elif (block := self._pool.block_of(key)) is not None:
            self.quotas.stored(key, self._pool.parent_of(block), tier)
        else:
            self.quotas.moved(key, tier)

    def charge(self, work: node_pb2.Work, chain: Sequence[BlockKey], store: TieredStore) -> None:
        """Count the chain of a new request towards its tenant's quota, as used now."""
        if work.tenant:
            self.quotas.claim(work.tenant, work.tenant_cached_nbytes, chain, store.match(chain))

    async def enforce(self, store: TieredStore) -> None:
        """Evict unused blocks beyond the quotas from every tier."""
        pool = self._pool
        victims = self.quotas.excess(lambda key: pool.block_of(key) is None or pool.evict(key))
        if victims:
            await store.remove(victims, reason="quota")
