"""Blocks of tenants in the engine's store, within their quotas."""

from __future__ import annotations

from collections.abc import Sequence

from moonpool.connectors.vllm.parameters.tenant import Tenant
from moonpool.kvstore.blocks.keys import BlockKey
from moonpool.kvstore.blocks.tier import Tier
from moonpool.kvstore.eviction.tenant_quota import TenantQuotas
from moonpool.kvstore.store import TieredStore

# Names come with requests. Blocks of more tenants belong to none.
_MOST_TENANTS = 4096


class TenantBlocks:
    """Counts blocks by tenant, and evicts a tenant's own before it gets more. One event loop."""

    def __init__(self, block_nbytes: int) -> None:
        self.quotas = TenantQuotas(block_nbytes)
        self._names: set[str] = set()

    def changed(self, key: BlockKey, tier: Tier | None, store: TieredStore | None) -> None:
        """The block's fastest copy is in ``tier`` now; None: no copy is left."""
        if tier is None:
            self.quotas.gone(key)
        elif store is not None and key in store.host:
            self.quotas.stored(key, store.host.parent_of(key), tier)
        else:
            self.quotas.moved(key, tier)

    def claim(self, tenant: Tenant, chain: Sequence[BlockKey], store: TieredStore) -> None:
        """A request of ``tenant`` uses ``chain``: its blocks, present and future, count towards the quota."""
        if tenant.name not in self._names:
            if len(self._names) >= _MOST_TENANTS:
                return
            self._names.add(tenant.name)
        self.quotas.claim(tenant.name, tenant.cached_nbytes, chain, store.match(chain))

    async def make_room(
        self, tenant: str, keys: Sequence[BlockKey], parent: BlockKey | None, store: TieredStore
    ) -> int:
        """Evict unused blocks of ``tenant`` so that ``keys`` may be added after ``parent``, and what exceeds
        the quotas of others. Returns how many of the first ``keys`` fit then."""
        if parent is not None and not store.is_held(parent):
            return 0  # a block is kept only after the one before it
        own = {*keys, parent}
        num_held = len(store.match(keys))
        num_new = len(keys) - num_held
        victims = self.quotas.excess(lambda key: key not in own, tenant, num_new)
        if victims:
            await store.remove(victims, reason="quota")
        room = self.quotas.room(tenant)
        return len(keys) if room is None else num_held + min(max(room, 0), num_new)

    async def trim(self, store: TieredStore) -> None:
        """Evict what exceeds the quotas."""
        victims = self.quotas.excess(lambda key: True)
        if victims:
            await store.remove(victims, reason="quota")
