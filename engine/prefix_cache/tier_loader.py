"""A prompt's prefix brought from the slower tiers into the pool before it is computed."""

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
from moonpool.kvstore.store import TieredStore
from moonpool.kvstore.tiers.copier import Bandwidth
from moonpool.transfer import TransferError

log = logging.getLogger(__name__)

# A GPU takes a prompt's blocks in milliseconds; they are pinned no longer than this for it.
_LONGEST_COPY_S = 10.0


@dataclass(slots=True)
class Loaded:
    """``block_ids`` are the first blocks of the chain, held for the caller: those the pool had, then
    ``num_host`` and ``num_ssd`` that were loaded."""

    block_ids: list[int] = field(default_factory=list)
    num_host: int = 0
    num_ssd: int = 0
    num_stale: int = 0  # that the index named and no tier held
    seconds: float = 0.0


class TierLoader:
    """Loads where that is predicted to take less time than computing; on the node's event loop."""

    def __init__(
        self, memory: BlockMemory, store: TieredStore, costs: Callable[[], dict[str, float]]
    ) -> None:
        """``costs``: the engine's ``profile``, as it is now."""
        self.host_bandwidth = Bandwidth()  # of copies to a GPU; the store knows its own
        self._memory = memory
        self._store = store
        self._costs = costs

    @property
    def host_load_nbytes_per_s(self) -> float:
        """What loads from host memory gave lately; 0 before the first."""
        return self.host_bandwidth.nbytes_per_s or self._store.stats.host_load_nbytes_per_s

    async def load(
        self, chain: Sequence[BlockKey], tiers: Sequence[Tier], *, slowest: Tier = Tier.SSD
    ) -> Loaded:
        """Bring what host memory and disk hold of ``chain`` (``tiers``: the store's ``match`` of it) to the
        pool, down to tier ``slowest``.

        The caller releases ``block_ids``. There may be no room, or blocks may turn out to be gone: then less
        is loaded, or nothing. When cancelled, nothing is held.
        """
        pool = self._memory.pool
        num_held, num_wanted = self._wanted(tiers, slowest)
        if not num_wanted:
            return Loaded()
        held = pool.match(chain[:num_held])
        num_wanted = min(num_wanted, pool.num_free - pool.num_idle(held))
        if len(held) < num_held or num_wanted <= 0:
            return Loaded()
        began_s = time.monotonic()
        pool.acquire(held)
        try:
            fresh = pool.allocate(num_wanted)
            held += fresh
            found = await self._fill(chain[num_held : num_held + num_wanted], fresh)
        except BaseException:
            pool.release(held)
            raise
        pool.release(held[num_held + len(found) :])
        del held[num_held + len(found) :]
        for i in range(num_held, len(held)):
            held[i] = pool.seal(held[i], chain[i], chain[i - 1] if i else None)
        num_ssd = found.count(Tier.SSD)
        return Loaded(held, len(found) - num_ssd, num_ssd, seconds=time.monotonic() - began_s)

    def lacks_room(self, chain: Sequence[BlockKey], tiers: Sequence[Tier]) -> bool:
        """Whether ``load`` would find too little room in the pool now for what is worth loading."""
        pool = self._memory.pool
        num_held, num_wanted = self._wanted(tiers, Tier.SSD)
        return num_wanted > pool.num_free - pool.num_idle(pool.match(chain[:num_held]))

    async def fill(self, chain: Sequence[BlockKey], sequence: QueuedSequence) -> Loaded:
        """As ``load``, into blocks that the sequence has reserved; they are still to be sealed. After an
        error or a cancellation their bytes are undefined."""
        first = sequence.num_computed_tokens // self._memory.pool.block_size
        num_wanted = self._num_worth_it(self._store.match(chain)[first:], Tier.SSD)
        keys = chain[first : first + num_wanted]
        began_s = time.monotonic()
        found = await self._fill(keys, sequence.block_table[first : first + num_wanted]) if keys else []
        num_ssd = found.count(Tier.SSD)
        return Loaded([], len(found) - num_ssd, num_ssd, seconds=time.monotonic() - began_s)

    def _wanted(self, tiers: Sequence[Tier], slowest: Tier) -> tuple[int, int]:
        """How many of the first blocks the pool has, and how many after them are worth loading."""
        num_held = next((i for i, tier in enumerate(tiers) if tier is not Tier.POOL), len(tiers))
        return num_held, self._num_worth_it(tiers[num_held:], slowest)

    async def _fill(self, keys: Sequence[BlockKey], block_ids: Sequence[int]) -> list[Tier]:
        """Where each of the first blocks came from; shorter than ``keys`` where one could not be had."""
        tiers = self._store.match(keys)
        await self._memory.pool.ready()
        if not self._memory.in_main_memory:
            return tiers[: await self._fill_gpu(keys, block_ids)]
        try:
            await self._store.get(keys, [self._memory.bytes_of(block) for block in block_ids])
        except (BlockMissing, BlockCorrupt) as error:
            log.warning("cached blocks are computed instead: %s", error)
            return tiers[: error.first_missing]
        return tiers

    async def _fill_gpu(self, keys: Sequence[BlockKey], block_ids: Sequence[int]) -> int:
        """How many of the first blocks were copied from host memory, by way of it from disk, to a GPU.

        They stay in the store's memory, which is pinned for such copies, until they are there.
        """
        lease = await self._store.pin(keys, _LONGEST_COPY_S)
        try:
            in_host = [block for block in lease.blocks if block.tier is Tier.HOST]
            sources = [self._store.host.bytes_of(block.slot) for block in in_host]
            checksums = [block.checksum for block in in_host]
            began_s = time.monotonic()
            try:
                bad = await self._memory.copy_in(sources, block_ids[: len(sources)], checksums)
            except TransferError as error:
                log.warning("cached blocks are computed instead: %s", error)
                return 0
            self.host_bandwidth.observe(
                len(sources) * self._memory.layout.block_nbytes, time.monotonic() - began_s
            )
        finally:
            self._store.release(lease.id)
        if bad is not None:
            log.warning("a block in host memory is not what was put there: it is computed instead")
            await self._store.remove([keys[bad]])
            return bad
        return len(sources)

    def _num_worth_it(self, tiers: Sequence[Tier], slowest: Tier) -> int:
        """How many of the first blocks are loaded in less time than computed."""
        compute_s = self._costs()["prefill_token_s"] * self._memory.layout.block_size
        stats, nbytes = self._store.stats, self._memory.layout.block_nbytes
        rates = {Tier.HOST: self.host_load_nbytes_per_s, Tier.SSD: stats.ssd_load_nbytes_per_s}
        for i, tier in enumerate(tiers):
            rate = rates.get(tier, 0.0)
            # What was never measured, neither computing nor loading, is tried.
            if tier > slowest or (compute_s and rate and nbytes / rate > compute_s):
                return i
        return len(tiers)
