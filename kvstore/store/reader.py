"""Blocks read out of the tiers: copied to a caller's memory, or pinned for a lease."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from moonpool.kvstore.blocks.keys import BlockKey
from moonpool.kvstore.blocks.tier import Tier
from moonpool.kvstore.errors import BlockCorrupt, BlockMissing
from moonpool.kvstore.store.residency import Residency
from moonpool.kvstore.tiers import metrics
from moonpool.kvstore.tiers.copier import Bandwidth, Copier
from moonpool.kvstore.tiers.promotion import Promoter, UnplacedBlock
from moonpool.kvstore.tiers.protocols import Bytes


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


class Reader:
    """The methods of ``TieredStore`` that read; blocks on disk are read into host memory first."""

    def __init__(
        self, residency: Residency, copier: Copier, block_nbytes: int, clock: Callable[[], float]
    ) -> None:
        self.host_bandwidth, self.disk_bandwidth = Bandwidth(), Bandwidth()
        self.promoter: Promoter | None = None
        if residency.disk is not None:
            self.promoter = Promoter(residency, residency.disk, self.disk_bandwidth, clock)
        self._residency = residency
        self._host, self._pool = residency.host, residency.pool
        self._copier = copier
        self._block_nbytes = block_nbytes
        self._clock = clock

    async def get(
        self, keys: Sequence[BlockKey], spans: Sequence[Bytes], disk: DiskWait | None = None
    ) -> list[Tier]:
        await self._residency.demoter.arrived(keys)
        tiers = self._residency.match(keys)
        async with self._promoted(keys, tiers, disk=disk) as unplaced:
            pinned = self._pin_prefix(keys[: len(tiers)], unplaced)
        began_s = self._clock()
        try:
            bad = await self._copy(keys, pinned, unplaced, spans)
        finally:
            self.release(*_slots(pinned))
        seconds = self._clock() - began_s
        self.host_bandwidth.observe(len(pinned) * self._block_nbytes, seconds)
        metrics.SECONDS.labels("host", "load").observe(seconds)
        if bad is not None:
            if pinned[bad].tier is Tier.HOST:
                self._residency.drop_corrupt(keys[bad])
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
        pool = self._pool
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
                sources.append(self._host.bytes_of(block.slot) if on_host else unplaced[key].bytes)
        checksums = [block.checksum for block in await self._hashed(pinned[num_device:])]
        bad = await self._copier.copy(sources, spans[num_device : len(pinned)], checksums)
        return None if bad is None else num_device + bad

    async def prefetch(self, keys: Sequence[BlockKey]) -> int:
        await self._residency.demoter.arrived(keys)
        before = self._residency.match(keys)
        async with self._promoted(keys, before, ahead=True):
            after = self._residency.match(keys)
            pairs = zip(before, after, strict=False)
            metrics.PREFETCHED_BLOCKS.inc(sum(pair == (Tier.SSD, Tier.HOST) for pair in pairs))
            return after.index(Tier.SSD) if Tier.SSD in after else len(after)

    async def pin(
        self, keys: Sequence[BlockKey], disk: DiskWait | None = None
    ) -> tuple[list[Pinned], list[int], list[int]]:
        """Pin the longest prefix that is in memory or can be read into it.

        Returns the blocks, and the pool blocks and host slots that are pinned for them.
        """
        await self._residency.demoter.arrived(keys)
        async with self._promoted(keys, self._residency.match(keys), disk=disk):
            pinned = self._pin_prefix(keys, {})
        in_pool, slots = _slots(pinned)
        if slots:
            # Also the predecessors of the first: an unpinned block has no pinned descendants.
            above = self._host.lineage(keys[len(in_pool)])[1:]
            self._host.pin(above)
            slots += above
        try:
            return await self._hashed(pinned), in_pool, slots
        except BaseException:
            self.release(in_pool, slots)
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
        if self.promoter is None or Tier.SSD not in tiers:
            yield {}
            return
        on_disk = [key for key, tier in zip(keys, tiers, strict=False) if tier is Tier.SSD]
        # Pinned, so that the rest of the chain is not evicted to make room.
        slots = [slot for key in keys[: len(tiers)] if (slot := self._residency.slot_of(key)) is not None]
        self._host.pin(slots)
        began_s = self._clock()
        try:
            unplaced = await self.promoter.promote(on_disk, ahead=ahead)
            if disk is not None:
                disk.seconds += self._clock() - began_s
            yield unplaced
        finally:
            self._host.unpin(slots)
            self._residency.make_headroom()

    def _pin_prefix(self, keys: Sequence[BlockKey], unplaced: Unplaced) -> list[Pinned]:
        """Pin the longest prefix of ``keys`` that is in memory. The pool's blocks are still to be hashed."""
        pinned: list[Pinned] = []
        for key in keys:
            block = None if self._pool is None else self._pool.block_of(key)
            if self._pool is not None and block is not None:
                self._pool.acquire((block,))
                pinned.append(Pinned(Tier.POOL, block, 0))
            elif (slot := self._residency.slot_of(key)) is not None:
                self._host.pin((slot,))
                pinned.append(Pinned(Tier.HOST, slot, self._host.checksum_of(slot)))
            elif key in unplaced:
                pinned.append(Pinned(Tier.SSD, -1, unplaced[key].checksum))
            else:
                break
        return pinned

    async def _hashed(self, pinned: Sequence[Pinned]) -> list[Pinned]:
        in_pool, _ = _slots(pinned)
        if not in_pool:
            return list(pinned)
        assert self._pool is not None
        found = dict(zip(in_pool, await self._pool.checksums(in_pool), strict=True))
        return [
            replace(block, checksum=found[block.slot]) if block.tier is Tier.POOL else block
            for block in pinned
        ]

    def release(self, in_pool: Sequence[int], slots: Sequence[int]) -> None:
        self._host.unpin(slots)
        if self._pool is not None and in_pool:
            self._pool.release(in_pool)


def _slots(pinned: Sequence[Pinned]) -> tuple[list[int], list[int]]:
    in_pool = [block.slot for block in pinned if block.tier is Tier.POOL]
    return in_pool, [block.slot for block in pinned if block.tier is Tier.HOST]
