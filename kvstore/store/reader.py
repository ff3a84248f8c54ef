"""Blocks read out of the tiers: copied to where they are wanted, or kept where they are for somebody."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

from moonpool.kvstore.blocks.keys import BlockKey
from moonpool.kvstore.blocks.tier import Tier
from moonpool.kvstore.errors import BlockCorrupt, BlockMissing
from moonpool.kvstore.store.leases import Lease, Pinned
from moonpool.kvstore.store.residency import Residency
from moonpool.kvstore.tiers import metrics
from moonpool.kvstore.tiers.copier import Bandwidth, Copier
from moonpool.kvstore.tiers.promotion import Promoter, UnplacedBlock
from moonpool.kvstore.tiers.protocols import Bytes


class Reader:
    """Reads; what lies on disk goes to host memory on the way."""

    def __init__(
        self, residency: Residency, copier: Copier, block_nbytes: int, clock: Callable[[], float]
    ) -> None:
        self.host_bandwidth, self.disk_bandwidth = Bandwidth(), Bandwidth()
        self.promoter: Promoter | None = None
        if residency.disk is not None:
            self.promoter = Promoter(
                residency.host,
                residency.disk,
                residency.is_held,
                residency.announce,
                self.disk_bandwidth,
                clock,
            )
        self._residency = residency
        self._copier = copier
        self._block_nbytes = block_nbytes
        self._clock = clock

    async def get(self, keys: Sequence[BlockKey], spans: Sequence[Bytes]) -> list[Tier]:
        """``TieredStore.get``"""
        await self._residency.demoter.arrived(keys)
        tiers = self._residency.match(keys)
        async with self._promoted(keys, tiers) as unplaced:
            pinned = self._pin_prefix(keys[: len(tiers)], unplaced)
        began_s = self._clock()
        try:
            bad = await self._copy(keys, pinned, unplaced, spans)
        finally:
            self._unpin(pinned)
        seconds = self._clock() - began_s
        self.host_bandwidth.observe(len(pinned) * self._block_nbytes, seconds)
        metrics.SECONDS.labels("host", "load").observe(seconds)
        if bad is not None:
            tier = pinned[bad].tier
            if tier is Tier.HOST:
                self._residency.drop_corrupt(keys[bad])
            raise BlockCorrupt(bad, len(keys), tier.name.lower())
        if len(pinned) < len(keys):
            for tier in tiers[len(pinned) :]:
                metrics.STALE_BLOCKS.labels(tier.name.lower()).inc()
            raise BlockMissing(len(pinned), len(keys))
        return tiers

    async def _copy(
        self,
        keys: Sequence[BlockKey],
        pinned: Sequence[Pinned],
        unplaced: dict[BlockKey, UnplacedBlock],
        spans: Sequence[Bytes],
    ) -> int | None:
        """Copy pinned blocks to the first of ``spans``; the first that is not what was put, or None."""
        pool, host = self._residency.pool, self._residency.host
        num_device = 0
        if pool is not None and not pool.in_main_memory:
            # What the pool holds of a chain is a prefix of it.
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
                sources.append(host.bytes_of(block.slot) if block.tier is Tier.HOST else unplaced[key].bytes)
        checksums = [block.checksum for block in await self._hashed(pinned[num_device:])]
        bad = await self._copier.copy(sources, spans[num_device : len(pinned)], checksums)
        return None if bad is None else num_device + bad

    async def prefetch(self, keys: Sequence[BlockKey]) -> int:
        """``TieredStore.prefetch``"""
        await self._residency.demoter.arrived(keys)
        before = self._residency.match(keys)
        async with self._promoted(keys, before, ahead=True):
            after = self._residency.match(keys)
            came = sum(was is Tier.SSD and now is Tier.HOST for was, now in zip(before, after, strict=False))
            metrics.PREFETCHED_BLOCKS.inc(came)
            return after.index(Tier.SSD) if Tier.SSD in after else len(after)

    async def pin(self, keys: Sequence[BlockKey]) -> tuple[list[Pinned], list[int], list[int]]:
        """Pin the longest prefix that is in memory or can be brought there: the blocks, and what of the pool
        and of host memory is held for them."""
        await self._residency.demoter.arrived(keys)
        async with self._promoted(keys, self._residency.match(keys)):
            pinned = self._pin_prefix(keys, {})
        in_pool = [block.slot for block in pinned if block.tier is Tier.POOL]
        slots = [block.slot for block in pinned if block.tier is Tier.HOST]
        if slots:
            # Also what is held before the first: after an unpinned block nothing may be pinned.
            above = self._residency.host.lineage(keys[len(in_pool)])[1:]
            self._residency.host.pin(above)
            slots += above
        try:
            return await self._hashed(pinned), in_pool, slots
        except BaseException:
            self._release(in_pool, slots)
            raise

    def release(self, lease: Lease) -> None:
        """Undo ``pin``."""
        self._release(lease.pool_blocks, lease.host_slots)

    @asynccontextmanager
    async def _promoted(
        self, keys: Sequence[BlockKey], tiers: Sequence[Tier], *, ahead: bool = False
    ) -> AsyncIterator[dict[BlockKey, UnplacedBlock]]:
        """Inside, what lay on disk of ``keys`` is in host memory; what found no place there is given."""
        if self.promoter is None or Tier.SSD not in tiers:
            yield {}
            return
        on_disk = [key for key, tier in zip(keys, tiers, strict=False) if tier is Tier.SSD]
        # The rest of the chain may not make room for it.
        host = self._residency.host
        slots = [slot for key in keys[: len(tiers)] if (slot := self._residency.slot_of(key)) is not None]
        host.pin(slots)
        try:
            yield await self.promoter.promote(on_disk, ahead=ahead)
        finally:
            host.unpin(slots)
            self._residency.make_headroom()

    def _pin_prefix(self, keys: Sequence[BlockKey], unplaced: dict[BlockKey, UnplacedBlock]) -> list[Pinned]:
        """Pin the longest prefix of ``keys`` that is in memory. Blocks of the pool are still to be hashed."""
        pinned: list[Pinned] = []
        pool, host = self._residency.pool, self._residency.host
        for key in keys:
            block = None if pool is None else pool.block_of(key)
            if pool is not None and block is not None:
                pool.acquire((block,))
                pinned.append(Pinned(Tier.POOL, block, 0))
            elif (slot := self._residency.slot_of(key)) is not None:
                host.pin((slot,))
                pinned.append(Pinned(Tier.HOST, slot, host.checksum_of(slot)))
            elif key in unplaced:
                pinned.append(Pinned(Tier.SSD, -1, unplaced[key].checksum))
            else:
                break
        return pinned

    async def _hashed(self, pinned: Sequence[Pinned]) -> list[Pinned]:
        """The same, with the checksums of the pool's."""
        in_pool = [block.slot for block in pinned if block.tier is Tier.POOL]
        if not in_pool:
            return list(pinned)
        assert self._residency.pool is not None
        found = dict(zip(in_pool, await self._residency.pool.checksums(in_pool), strict=True))
        return [
            replace(block, checksum=found[block.slot]) if block.tier is Tier.POOL else block
            for block in pinned
        ]

    def _unpin(self, pinned: Sequence[Pinned]) -> None:
        in_pool = [block.slot for block in pinned if block.tier is Tier.POOL]
        self._release(in_pool, [block.slot for block in pinned if block.tier is Tier.HOST])

    def _release(self, in_pool: Sequence[int], slots: Sequence[int]) -> None:
        self._residency.host.unpin(slots)
        if self._residency.pool is not None and in_pool:
            self._residency.pool.release(in_pool)
