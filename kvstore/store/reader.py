"""Blocks read out of the tiers: copied to a caller's memory, or pinned for a lease."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from moonpool.kvstore.blocks.keys import BlockKey
from moonpool.kvstore.blocks.layout import BlockFormat
from moonpool.kvstore.blocks.tier import Tier
from moonpool.kvstore.errors import BlockCorrupt, BlockMissing
from moonpool.kvstore.eviction.savings import SavedSeconds
from moonpool.kvstore.grants.table import GrantTable, Slot
from moonpool.kvstore.store.promotion import Promoter, UnplacedBlock
from moonpool.kvstore.store.residency import OnChange, Residency
from moonpool.kvstore.tiers import metrics
from moonpool.kvstore.tiers.copier import Bandwidth
from moonpool.kvstore.tiers.protocols import Bytes, DiskTier, PoolTier
from moonpool.runtime.config.options import StoreOptions


@dataclass(frozen=True, slots=True)
class Pinned:
    """A block that stays where it is while its lease lasts."""

    tier: Tier  # POOL or HOST
    slot: int  # block of the pool, or slot of the host tier's memory
    checksum: int  # xxh3-64


@dataclass(frozen=True, slots=True)
class Lease:
    """``blocks`` are the first of the requested chain; nothing is pinned where ``id``, of the grant, is 0.
    It ends ``granted_s`` after the request for it, or later."""

    id: int
    granted_s: float
    blocks: list[Pinned]


@dataclass(slots=True)
class DiskWait:
    """``seconds`` in which a reader waited until blocks on disk were in host memory."""

    seconds: float = 0.0


Unplaced = dict[BlockKey, UnplacedBlock]


class Reader(Residency):
    """The tiers of a node and the reads from them; blocks on disk are read into host memory first."""

    def __init__(
        self,
        layout: BlockFormat,
        options: StoreOptions,
        memory: Bytes,
        *,
        pool: PoolTier | None = None,
        ssd: DiskTier | None = None,
        on_change: OnChange = lambda key, tier: None,
        saved_s: SavedSeconds | None = None,
        clock: Callable[[], float] = time.monotonic,
        keep_until_written: bool = False,
    ) -> None:
        """``memory``: uint8, the host tier; slot i is bytes ``[i * block_nbytes, (i + 1) * block_nbytes)``.

        ``ssd``: closed by the store.
        ``on_change(key, tier)``: the block's fastest copy is in ``tier`` now; None: no copy is left. It is
        not called for blocks that the pool adds.
        ``saved_s``: what a hit in host memory is worth to its eviction policy.
        ``keep_until_written``: host memory keeps every block until it is on disk or its write failed; call
        ``room`` before adding more.

        Raises ``LayoutError``: ``memory`` holds no block.
        """
        super().__init__(
            layout, options, memory, pool, ssd, on_change, saved_s, keep_until_written=keep_until_written
        )
        self.layout = layout
        self._block_nbytes = layout.block_nbytes
        self._options = options
        self._clock = clock
        self._host_bandwidth, self._disk_bandwidth = Bandwidth(), Bandwidth()
        self._promoter = None if ssd is None else Promoter(self, ssd, self._disk_bandwidth, clock)
        self.grants = GrantTable(self._generation_of, longest_s=options.lease_ttl_s, clock=clock)
        """All that was granted of host memory and the pool: leases on blocks, and puts."""

    async def get(
        self, keys: Sequence[BlockKey], spans: Sequence[Bytes], disk: DiskWait | None = None
    ) -> list[Tier]:
        """Fill ``spans[i]`` (uint8 [block_nbytes]) with the block ``keys[i]``, verified. Returns each one's
        tier; blocks on disk are in host memory afterwards. ``disk``: its share of the time is added to that.

        Raises:
            BlockMissing: some are not held, or could not be read in time.
            BlockCorrupt: a copy did not match its checksum and has been dropped.
        After an error the spans before its ``first_missing`` are filled and the others undefined; after a
        cancellation all are undefined. Nothing is written to ``spans`` once this has ended.
        """
        await self.demoter.arrived(keys)
        tiers = self.match(keys)
        async with self._promoted(keys, tiers, disk=disk) as unplaced:
            pinned = self._pin_prefix(keys[: len(tiers)], unplaced)
        began_s = self._clock()
        try:
            bad = await self._copy(keys, pinned, unplaced, spans)
        finally:
            self._unpin(*_slots(pinned))
        seconds = self._clock() - began_s
        self._host_bandwidth.observe(len(pinned) * self._block_nbytes, seconds)
        metrics.SECONDS.labels("host", "load").observe(seconds)
        if bad is not None:
            if pinned[bad].tier is Tier.HOST:
                self.drop_corrupt(keys[bad])
            raise BlockCorrupt(bad, len(keys), pinned[bad].tier.name.lower())
        if len(pinned) < len(keys):
            for tier in tiers[len(pinned) :]:
                metrics.STALE_BLOCKS.labels(tier.name.lower()).inc()
            raise BlockMissing(len(pinned), len(keys))
        return tiers

    async def _copy(
        self, keys: Sequence[BlockKey], pinned: Sequence[Pinned], unplaced: Unplaced, spans: Sequence[Bytes]
    ) -> int | None:
        """Copy pinned blocks to the first of ``spans``; returns the first that is corrupt, or None."""
        pool = self.pool
        num_device = 0
        if pool is not None and not pool.in_main_memory:
            # The pool has a prefix of each chain.
            num_device = sum(block.tier is Tier.POOL for block in pinned)
            slots = [block.slot for block in pinned[:num_device]]
            if num_device:
                await self._copier.run(lambda: pool.copy_out(slots, spans[:num_device]))
        sources: list[Bytes] = []
        for key, block in zip(keys[num_device:], pinned[num_device:], strict=False):
            if block.tier is Tier.POOL:
                assert pool is not None
                sources.append(pool.bytes_of(block.slot))
            else:
                on_host = block.tier is Tier.HOST
                sources.append(self.host.bytes_of(block.slot) if on_host else unplaced[key].bytes)
        checksums = [block.checksum for block in await self._hashed(pinned[num_device:])]
        bad = await self._copier.copy(sources, spans[num_device : len(pinned)], checksums)
        return None if bad is None else num_device + bad

    async def prefetch(self, keys: Sequence[BlockKey]) -> int:
        """Read this chain's blocks on disk into host memory, ahead of their use. Returns how many of the
        first blocks are in memory then."""
        await self.demoter.arrived(keys)
        before = self.match(keys)
        async with self._promoted(keys, before, ahead=True):
            after = self.match(keys)
            pairs = zip(before, after, strict=False)
            metrics.PREFETCHED_BLOCKS.inc(sum(pair == (Tier.SSD, Tier.HOST) for pair in pairs))
            return after.index(Tier.SSD) if Tier.SSD in after else len(after)

    async def pin(self, keys: Sequence[BlockKey], ttl_s: float, owner: str = "a reader") -> Lease:
        """Keep the longest prefix of ``keys`` in memory until ``release``, for at most ``ttl_s`` and
        ``store.lease_ttl_s``. Blocks on disk are read into host memory first, as far as there is room.
        """
        pinned, in_pool, slots = await self._pin(keys)
        if not pinned:
            return Lease(0, 0.0, [])
        granted = [*((Tier.POOL, block) for block in in_pool), *((Tier.HOST, slot) for slot in slots)]
        grant = self.grants.grant(owner, granted, ttl_s, lambda _: self._unpin(in_pool, slots))
        return Lease(grant.id, grant.granted_s, pinned)

    @asynccontextmanager
    async def pinned(
        self, keys: Sequence[BlockKey], disk: DiskWait | None = None
    ) -> AsyncIterator[list[Pinned]]:
        """``pin`` for this process itself: inside the block, however long it takes. ``disk``: see ``get``."""
        pinned, in_pool, slots = await self._pin(keys, disk)
        try:
            yield pinned
        finally:
            self._unpin(in_pool, slots)

    def release(self, lease_id: int) -> None:
        """End a lease. Idempotent; a lapsed or unknown one is no error."""
        self.grants.release(lease_id)

    def sweep(self) -> int:
        """End the grants that have expired; returns how many. Call it regularly."""
        return self.grants.sweep()

    def _generation_of(self, slot: Slot) -> int:
        tier, number = slot
        if tier is Tier.HOST:
            return self.host.generation_of(number)
        assert self.pool is not None
        return self.pool.generation_of(number)

    async def _pin(
        self, keys: Sequence[BlockKey], disk: DiskWait | None = None
    ) -> tuple[list[Pinned], list[int], list[int]]:
        """Pin the longest prefix that is in memory or can be read into it.

        Returns the blocks, and the pool blocks and host slots that are pinned for them.
        """
        await self.demoter.arrived(keys)
        async with self._promoted(keys, self.match(keys), disk=disk):
            pinned = self._pin_prefix(keys, {})
        in_pool, slots = _slots(pinned)
        if slots:
            # Also the predecessors of the first: an unpinned block has no pinned descendants.
            above = self.host.lineage(keys[len(in_pool)])[1:]
            self.host.pin(above)
            slots += above
        try:
            return await self._hashed(pinned), in_pool, slots
        except BaseException:
            self._unpin(in_pool, slots)
            raise

    @asynccontextmanager
    async def _promoted(
        self,
        keys: Sequence[BlockKey],
        tiers: Sequence[Tier],
        *,
        ahead: bool = False,
        disk: DiskWait | None = None,
    ) -> AsyncIterator[Unplaced]:
        """Inside, the blocks on disk are in host memory, except those yielded, which found no room."""
        if self._promoter is None or Tier.SSD not in tiers:
            yield {}
            return
        on_disk = [key for key, tier in zip(keys, tiers, strict=False) if tier is Tier.SSD]
        # Pinned, so that the rest of the chain is not evicted to make room.
        slots = [slot for key in keys[: len(tiers)] if (slot := self.slot_of(key)) is not None]
        self.host.pin(slots)
        began_s = self._clock()
        try:
            unplaced = await self._promoter.promote(on_disk, ahead=ahead)
            if disk is not None:
                disk.seconds += self._clock() - began_s
            yield unplaced
        finally:
            self.host.unpin(slots)
            self.make_headroom()

    def _pin_prefix(self, keys: Sequence[BlockKey], unplaced: Unplaced) -> list[Pinned]:
        """Pin the longest prefix of ``keys`` that is in memory. The pool's blocks are still to be hashed."""
        pinned: list[Pinned] = []
        for key in keys:
            block = None if self.pool is None else self.pool.block_of(key)
            if self.pool is not None and block is not None:
                self.pool.acquire((block,))
                pinned.append(Pinned(Tier.POOL, block, 0))
            elif (slot := self.slot_of(key)) is not None:
                self.host.pin((slot,))
                pinned.append(Pinned(Tier.HOST, slot, self.host.checksum_of(slot)))
            elif key in unplaced:
                pinned.append(Pinned(Tier.SSD, -1, unplaced[key].checksum))
            else:
                break
        return pinned

    async def _hashed(self, pinned: Sequence[Pinned]) -> list[Pinned]:
        in_pool, _ = _slots(pinned)
        if not in_pool:
            return list(pinned)
        assert self.pool is not None
        found = dict(zip(in_pool, await self.pool.checksums(in_pool), strict=True))
        return [
            replace(block, checksum=found[block.slot]) if block.tier is Tier.POOL else block
            for block in pinned
        ]

    def _unpin(self, in_pool: Sequence[int], slots: Sequence[int]) -> None:
        self.host.unpin(slots)
        if self.pool is not None and in_pool:
            self.pool.release(in_pool)

    def check_integrity(self) -> None:
        super().check_integrity()
        self.grants.check_integrity()


def _slots(pinned: Sequence[Pinned]) -> tuple[list[int], list[int]]:
    in_pool = [block.slot for block in pinned if block.tier is Tier.POOL]
    return in_pool, [block.slot for block in pinned if block.tier is Tier.HOST]
