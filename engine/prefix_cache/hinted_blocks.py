"""What clients ask for the cached blocks of their requests: keep them for a while, or let them go."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from moonpool.engine.memory.block_pool import BlockPool
from moonpool.kvstore.blocks.keys import BlockKey
from moonpool.kvstore.eviction.kept_blocks import KeptBlocks
from moonpool.kvstore.eviction.surplus_copies import unshared_end
from moonpool.kvstore.tiers.host import HostTier

# Of the blocks in pool and host memory: of all tenants, and of one without a limit of its own.
_MOST_KEPT = 0.5
_MOST_OF_TENANT = 0.25
# How long a cancelled request may take to release its blocks, in looks.
_LOOKS, _LOOK_S = 25, 0.02


class HintedBlocks:
    """Marks blocks of the pool and of host memory, and copies nothing. On the node's event loop."""

    def __init__(self, pool: BlockPool, host: HostTier) -> None:
        self._pool, self._host = pool, host
        self._num_blocks = pool.num_blocks + host.capacity
        self.kept: KeptBlocks[BlockKey] = KeptBlocks(round(_MOST_KEPT * self._num_blocks))
        pool.kept = host.kept = self.kept

    def keep(self, tenant: str, chain: Sequence[BlockKey], keep_s: float, limit_blocks: int) -> int:
        """Evict the first blocks of ``chain`` after all others, for ``keep_s``. Returns how many: as far as
        the limit of the tenant goes, and that of all. ``limit_blocks``: 0: the tenant has none of its own."""
        most = limit_blocks or max(round(_MOST_OF_TENANT * self._num_blocks), 1)
        num_kept = self.kept.keep(tenant, chain, keep_s, most)
        for surplus in (self._pool.surplus, self._host.surplus):
            for key in chain[:num_kept]:
                surplus.forget(key)
        return num_kept

    async def drop(self, chain: Sequence[BlockKey]) -> int:
        """Evict the end of ``chain`` before all others, as far as no other chain shares it. Returns how many
        blocks that is."""
        pool, host = self._pool, self._host
        for _ in range(_LOOKS):
            if not pool.in_use(chain):
                break
            await asyncio.sleep(_LOOK_S)
        end = unshared_end(chain, lambda key, after: pool.is_shared(key, after) or host.is_shared(key, after))
        self.kept.forget(end)
        pool.surplus.drop(key for key in end if pool.block_of(key) is not None)
        host.surplus.drop(key for key in end if key in host)
        return len(end)
