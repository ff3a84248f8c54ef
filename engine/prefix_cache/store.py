"""A node's tiers below its pool, and their connection to pool, index and peers."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING

from moonpool.engine.engine import Engine
from moonpool.engine.memory.block_memory import BlockMemory
from moonpool.engine.prefix_cache.eviction_savings import EvictionSavings
from moonpool.engine.prefix_cache.hinted_blocks import HintedBlocks
from moonpool.engine.prefix_cache.tier_loader import TierLoader
from moonpool.kvstore.blocks.keys import BlockKey
from moonpool.kvstore.blocks.tier import Tier
from moonpool.kvstore.store import Lease, TieredStore
from moonpool.kvstore.store.residency import OnChange
from moonpool.protos import node_pb2
from moonpool.runtime.config.options import Config
from moonpool.runtime.errors import ConfigError
from moonpool.transfer import Region, TransferAgent, checksum

if TYPE_CHECKING:
    from moonpool.kvstore.index.redis.node_record import TierFill
    from moonpool.kvstore.tiers.ssd import SsdTier

log = logging.getLogger(__name__)

# Eviction policies learn of a request's chain (up to 10 µs a block) this long after its arrival, so that its
# first token does not wait.
USE_DELAY_S = 0.1

_PROBE_NBYTES = 16 << 20


class NodeStore:
    """Reports sealed blocks of the pool to ``on_change`` and moves evicted ones to host memory.

    ``tiers``: the store. ``loader``: loads a prompt's prefix into the pool.
    """

    def __init__(
        self, engine: Engine, memory: BlockMemory, region: Region, tiers: TieredStore, on_change: OnChange
    ) -> None:
        self.tiers = tiers
        self.loader = TierLoader(memory, tiers, engine.profile)
        self._memory = memory
        self._region = region
        self._on_change = on_change
        self._probed_nbytes_per_s = 0.0
        self.hints = HintedBlocks(engine.pool, tiers.host)
        engine.pool.on_sealed = self._sealed
        engine.pool.on_evicted = self._evicted
        engine.pool.when_read = tiers.copied
        engine.adapter_loader.from_store = self.loader.fill_whole

    @classmethod
    async def open(
        cls,
        config: Config,
        folder: str,
        agent: TransferAgent,
        engine: Engine,
        memory: BlockMemory,
        on_change: OnChange,
    ) -> NodeStore:
        """Allocate host memory and re-adopt the blocks in the node's ``folder`` on disk.

        Raises ConfigError if not even one block fits, and as ``SsdTier.open``.
        """
        options = config.store
        if options.host.capacity_nbytes < engine.layout.block_nbytes:
            key = "store.host.capacity_nbytes"
            raise ConfigError(
                f"{key} is {options.host.capacity_nbytes:,}; it must hold a KV block of this model, "
                f"{engine.layout.block_nbytes:,} bytes",
                key,
            )
        region = agent.allocate(options.host.capacity_nbytes, "host", mapped=False)
        savings = EvictionSavings(engine.layout, engine.profile)
        ssd: SsdTier | None = None
        if options.ssd.path:
            # Imported on use, as below: a node without disk and index needs neither package.
            from moonpool.kvstore.tiers.ssd import SsdTier

            directory = Path(options.ssd.path) / folder
            ssd = await SsdTier.open(
                directory,
                engine.layout,
                capacity_nbytes=options.ssd.capacity_nbytes,
                threads=options.ssd.io_threads,
                policy=options.ssd.policy,
                saved_s=savings.ssd,
                io_deadline_s=options.ssd.deadline_s,
            )
            log.info("%d blocks of an earlier start re-adopted from %s", len(ssd), directory)
        tiers = savings.store = TieredStore(
            engine.layout,
            options,
            region.array,
            pool=memory,
            ssd=ssd,
            on_change=on_change,
            saved_s=savings.host,
        )
        try:
            store = cls(engine, memory, region, tiers, on_change)
            await store._probe()
            await tiers.start()
        except BaseException:
            await tiers.close()
            raise
        return store

    async def close(self, flush_s: float) -> None:
        """Write blocks that are only in memory to disk for up to ``flush_s``, then close."""
        await self.tiers.flush(flush_s)
        await self.tiers.close()

    def describe(self, lease: Lease) -> node_pb2.BlockSpans:
        """Return spans and checksums of leased blocks, for a peer that reads them."""
        nbytes = self._memory.layout.block_nbytes
        pool_id, host_id = self._memory.region.id, self._region.id
        return node_pb2.BlockSpans(
            region=[pool_id if block.tier is Tier.POOL else host_id for block in lease.blocks],
            offset=[block.slot * nbytes for block in lease.blocks],
            checksum=[block.checksum for block in lease.blocks],
        )

    def profile(self) -> dict[str, float]:
        """Return the load rates of ``protos.Profile``."""
        stats = self.tiers.stats
        host = self.loader.host_load_nbytes_per_s or self._probed_nbytes_per_s
        return {"host_load_nbytes_per_s": host, "ssd_load_nbytes_per_s": stats.ssd_load_nbytes_per_s}

    def fill(self) -> dict[str, TierFill]:
        """Return the fill of the tiers below the pool, for the index."""
        from moonpool.kvstore.index.redis.node_record import TierFill

        return {tier.name: TierFill(tier.capacity_blocks, tier.num_blocks) for tier in self.tiers.stats.tiers}

    def status(self) -> list[node_pb2.TierStatus]:
        nbytes = self._memory.layout.block_nbytes
        return [
            node_pb2.TierStatus(
                name=tier.name,
                num_blocks=tier.capacity_blocks,
                num_used_blocks=tier.num_pinned,
                num_cached_blocks=tier.num_blocks,
                nbytes=tier.capacity_blocks * nbytes,
            )
            for tier in self.tiers.stats.tiers
        ]

    async def _probe(self) -> None:
        """Time a verified copy from host memory to the pool, before either is used."""
        nbytes = self._memory.layout.block_nbytes
        num_blocks = min(_PROBE_NBYTES, self._region.nbytes) // nbytes or 1
        block_ids = range(min(num_blocks, self._memory.pool.num_blocks))
        sources = [self._region.array[i * nbytes : (i + 1) * nbytes] for i in block_ids]
        checksums = [checksum(source.data) for source in sources]
        for _ in range(2):  # the first run touches cold memory
            began_s = time.perf_counter()
            bad = await self._memory.copy_in(sources, block_ids, checksums)
            self._probed_nbytes_per_s = len(sources) * nbytes / (time.perf_counter() - began_s)
            assert bad is None, "a block changed during its copy"

    def _sealed(self, block_id: int, key: BlockKey) -> None:
        self._on_change(key, Tier.POOL)
        self.tiers.sealed(key)

    def _evicted(self, block_id: int, key: BlockKey) -> None:
        memory = self._memory
        self.tiers.demote(key, memory.pool.parent_of(block_id), block_id, surplus=key in memory.pool.surplus)
        memory.forget(block_id)
