"""Loads a prompt's prefix from the slower tiers into the pool."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from moonpool.engine.batching.sequence import Sequence as QueuedSequence
from moonpool.engine.memory.block_memory import BlockMemory
from moonpool.kvstore.blocks.keys import BlockKey
from moonpool.kvstore.blocks.tier import Tier
from moonpool.kvstore.errors import BlockCorrupt, BlockMissing
from moonpool.kvstore.store import DiskWait, TieredStore
from moonpool.kvstore.tiers.copier import Bandwidth
from moonpool.transfer import TransferError

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Loaded:
    """``block_ids``: the first blocks of the chain, acquired for the caller; the last num_host + num_ssd
    of them were loaded."""

    block_ids: list[int] = field(default_factory=list)
    num_host: int = 0
    num_ssd: int = 0
    num_stale: int = 0  # in the index but in no tier
    seconds: float = 0.0
    disk_s: float = 0.0  # of those, until the blocks on disk were in host memory


class TierLoader:
    """Loads blocks if that is predicted to be faster than computing. Runs on the node's event loop."""

    def __init__(
        self, memory: BlockMemory, store: TieredStore, costs: Callable[[], dict[str, float]]
    ) -> None:
        """``costs``: ``Engine.profile``."""
        self.host_bandwidth = Bandwidth()  # of copies to a GPU
        self._memory = memory
        self._store = store
        self._costs = costs

    @property
    def host_load_nbytes_per_s(self) -> float:
        """The recent rate of loads from host memory; 0 before the first."""
        return self.host_bandwidth.nbytes_per_s or self._store.stats.host_load_nbytes_per_s

    async def load(
        self, chain: Sequence[BlockKey], tiers: Sequence[Tier], *, slowest: Tier = Tier.SSD
    ) -> Loaded:
        """Load ``chain`` into the pool, from tiers down to ``slowest``. ``tiers``: the store's ``match`` of
        it.

        The caller releases ``block_ids``. Loads less, or nothing, without room or when blocks are gone. A
        cancellation releases all blocks.
        """
        pool = self._memory.pool
        num_local, num_wanted = self._wanted(tiers, slowest)
        if not num_wanted:
            return Loaded()
        blocks = pool.match(chain[:num_local])
        num_wanted = min(num_wanted, pool.num_spare - pool.num_idle(blocks))
        if len(blocks) < num_local or num_wanted <= 0:
            return Loaded()
        began_s = time.monotonic()
        pool.acquire(blocks)
        disk = DiskWait()
        try:
            fresh = pool.allocate(num_wanted)
            blocks += fresh
            found = await self._fill(chain[num_local : num_local + num_wanted], fresh, disk)
        except BaseException:
            pool.release(blocks)
            raise
        pool.release(blocks[num_local + len(found) :])
        del blocks[num_local + len(found) :]
        for i in range(num_local, len(blocks)):
            blocks[i] = pool.seal(blocks[i], chain[i], chain[i - 1] if i else None)
        num_ssd = found.count(Tier.SSD)
        seconds = time.monotonic() - began_s
        return Loaded(blocks, len(found) - num_ssd, num_ssd, seconds=seconds, disk_s=disk.seconds)

    def lacks_room(self, chain: Sequence[BlockKey], tiers: Sequence[Tier]) -> bool:
        """Return whether the pool has too little room now for the blocks worth loading."""
        pool = self._memory.pool
        num_local, num_wanted = self._wanted(tiers, Tier.SSD)
        return num_wanted > pool.num_spare - pool.num_idle(pool.match(chain[:num_local]))

    async def fill(self, chain: Sequence[BlockKey], sequence: QueuedSequence) -> Loaded:
        """Load into blocks that the sequence has reserved, without sealing them. After an error or a
        cancellation their bytes are undefined."""
        first = sequence.num_computed_tokens // self._memory.pool.block_size
        num_wanted = self._num_worth_it(self._store.match(chain)[first:], Tier.SSD)
        keys = chain[first : first + num_wanted]
        began_s, disk = time.monotonic(), DiskWait()
        blocks = sequence.block_table[first : first + num_wanted]
        found = await self._fill(keys, blocks, disk) if keys else []
        num_ssd = found.count(Tier.SSD)
        seconds = time.monotonic() - began_s
        return Loaded([], len(found) - num_ssd, num_ssd, seconds=seconds, disk_s=disk.seconds)

    async def fill_whole(self, chain: Sequence[BlockKey], block_ids: Sequence[int]) -> Sequence[Tier]:
        """Load a chain that is of use only as a whole, such as an adapter, into allocated blocks. Return the
        tier of each; fewer: it could not be loaded. After an error or a cancellation, or with fewer, their
        bytes are undefined."""
        for key in reversed(chain):
            self._memory.pool.evict(key)  # what is left of a former load
        tiers = self._store.match(chain)
        self._store.used(chain, len(tiers))
        if len(tiers) < len(chain) or Tier.POOL in tiers:
            return []
        return await self._fill(chain, block_ids, DiskWait())

    def _wanted(self, tiers: Sequence[Tier], slowest: Tier) -> tuple[int, int]:
        """Return how many leading blocks the pool has, and how many after them are worth loading."""
        num_local = next((i for i, tier in enumerate(tiers) if tier is not Tier.POOL), len(tiers))
        return num_local, self._num_worth_it(tiers[num_local:], slowest)

    async def _fill(self, keys: Sequence[BlockKey], block_ids: Sequence[int], disk: DiskWait) -> list[Tier]:
        """Fill blocks and return the tier of each; the result ends before the first block that failed."""
        tiers = self._store.match(keys)
        await self._memory.pool.ready()
        if not self._memory.in_main_memory:
            return tiers[: await self._fill_gpu(keys, block_ids, disk)]
        try:
            await self._store.get(keys, [self._memory.bytes_of(block) for block in block_ids], disk)
        except (BlockMissing, BlockCorrupt) as error:
            log.warning("cached blocks are not loaded: %s", error)
            return tiers[: error.first_missing]
        return tiers

    async def _fill_gpu(self, keys: Sequence[BlockKey], block_ids: Sequence[int], disk: DiskWait) -> int:
        """Copy blocks to a GPU by way of the store's pinned host memory. Return the number of leading
        blocks copied."""
        async with self._store.pinned(keys, disk) as pinned:
            in_host = [block for block in pinned if block.tier is Tier.HOST]
            sources = [self._store.host.bytes_of(block.slot) for block in in_host]
            checksums = [block.checksum for block in in_host]
            began_s = time.monotonic()
            try:
                bad = await self._memory.copy_in(sources, block_ids[: len(sources)], checksums)
            except TransferError as error:
                log.warning("cached blocks are not loaded: %s", error)
                return 0
            self.host_bandwidth.observe(
                len(sources) * self._memory.layout.block_nbytes, time.monotonic() - began_s
            )
        if bad is not None:
            log.warning("a block in host memory has a wrong checksum: it is dropped")
            await self._store.remove([keys[bad]])
            return bad
        return len(sources)

    def _num_worth_it(self, tiers: Sequence[Tier], slowest: Tier) -> int:
        """Return how many leading blocks load faster than they compute."""
        compute_s = self._costs()["prefill_token_s"] * self._memory.layout.block_size
        stats, nbytes = self._store.stats, self._memory.layout.block_nbytes
        rates = {Tier.HOST: self.host_load_nbytes_per_s, Tier.SSD: stats.ssd_load_nbytes_per_s}
        for i, tier in enumerate(tiers):
            rate = rates.get(tier, 0.0)
            # Without measurements, try.
            if tier > slowest or (compute_s and rate and nbytes / rate > compute_s):
                return i
        return len(tiers)
