"""Which tier holds which block, and what happens to a block that leaves one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from moonpool.kvstore.blocks.keys import BlockKey
from moonpool.kvstore.blocks.layout import BlockFormat
from moonpool.kvstore.blocks.tier import Tier
from moonpool.kvstore.eviction.savings import SavedSeconds
from moonpool.kvstore.tiers import metrics
from moonpool.kvstore.tiers.copier import Copier
from moonpool.kvstore.tiers.demotion import Demoter
from moonpool.kvstore.tiers.host import HostTier
from moonpool.kvstore.tiers.protocols import Bytes, DiskTier, PoolTier
from moonpool.kvstore.tiers.write_queue import DiskWriter
from moonpool.runtime.config.options import StoreOptions

OnChange = Callable[[BlockKey, Tier | None], None]


class Residency:
    """The tiers together hold a prefix of every chain: the pool and the disk do each, and the block before
    one in host memory is in some tier.

    A block that leaves the pool goes to host memory; one that leaves host memory goes to disk as the write
    policy says, or is lost, and with it what host memory holds after it. Nothing here waits.
    """

    def __init__(
        self,
        layout: BlockFormat,
        options: StoreOptions,
        memory: Bytes,
        pool: PoolTier | None,
        disk: DiskTier | None,
        copier: Copier,
        on_change: OnChange,
        saved_s: SavedSeconds | None = None,
    ) -> None:
        self.host = HostTier(
            memory,
            layout,
            policy=options.host.policy,
            saved_s=saved_s,
            on_evicted=self._evicted_from_host,
        )
        self.pool = pool
        self.disk = disk
        self.demoter = Demoter(self.host, pool, copier, self._demoted)
        self.writer: DiskWriter | None = None
        self._write_policy = options.write_policy
        self._on_change = on_change
        capacity = self.host.stats.num_blocks
        self._num_reserve = round(capacity * (1 - options.host.watermark))
        self._takes_over = False  # what leaves host memory at this moment is written to disk
        if disk is not None:
            disk.on_dropped = self._dropped_by_disk
            max_queued = max(options.ssd.queue_nbytes // layout.block_nbytes, 1)
            self.writer = DiskWriter(
                disk,
                self.host,
                pool,
                copier,
                max_queued=max_queued,
                # The queue may not make host memory its own.
                max_leaving=max(min(max_queued, capacity // 4), 1),
                on_settled=self.announce,
                sources_settled=self.demoter.copied,
            )

    # ------------------------------------------------------------------ what is where

    def tier_of(self, key: BlockKey) -> Tier | None:
        """The fastest tier that holds the block."""
        if self.pool is not None and key in self.pool:
            return Tier.POOL
        return self._tier_below(key)

    def is_held(self, key: BlockKey) -> bool:
        return self.tier_of(key) is not None

    def match(self, keys: Sequence[BlockKey]) -> list[Tier]:
        """The tier of each block of the longest prefix that is held."""
        tiers: list[Tier] = []
        for key in keys:
            tier = self.tier_of(key)
            if tier is None:
                break
            tiers.append(tier)
        return tiers

    def blocks(self) -> Iterator[tuple[BlockKey, Tier]]:
        """Every block with its fastest tier, each once."""
        in_pool = set() if self.pool is None else set(self.pool.keys())
        in_memory = set(self.host.keys()) | self.demoter.coming.keys()
        if self.writer is not None:
            in_memory |= self.writer.leaving.keys()
        on_disk = () if self.disk is None else self.disk.keys()
        yield from ((key, Tier.POOL) for key in in_pool)
        yield from ((key, Tier.HOST) for key in in_memory - in_pool)
        yield from ((key, Tier.SSD) for key in on_disk if key not in in_memory and key not in in_pool)

    def slot_of(self, key: BlockKey) -> int | None:
        """Where in host memory the block is: held there, or on its way out."""
        slot = self.host.slot_of(key)
        if slot is None and self.writer is not None and (leaving := self.writer.leaving.get(key)):
            return leaving.slot
        return slot

    def _tier_below(self, key: BlockKey) -> Tier | None:
        if self.slot_of(key) is not None or key in self.demoter.coming:
            return Tier.HOST
        return Tier.SSD if self.disk is not None and key in self.disk else None

    # ------------------------------------------------------------------ blocks come

    def stored(self, key: BlockKey) -> None:
        """Host memory holds a new block."""
        self.announce(key)
        if self._write_policy == "write-through":
            self.write(key)
        self.make_headroom()

    def sealed(self, key: BlockKey) -> None:
        """The pool holds a new block."""
        if self._write_policy == "write-through":
            self.write(key)

    def used(self, keys: Sequence[BlockKey], num_held: int) -> None:
        """A request uses a chain of which the first ``num_held`` are held."""
        self.host.use(keys)
        if self.disk is not None:
            self.disk.use(keys)
        if num_held and self._write_policy == "selective":
            self.write(keys[num_held - 1])

    def write(self, key: BlockKey) -> None:
        """Queue a block, with what is missing before it, for the disk."""
        if self.writer is not None and self.disk is not None and key not in self.disk:
            self.writer.offer(key)

    # ------------------------------------------------------------------ blocks go

    def demote(self, key: BlockKey, parent: BlockKey | None, block: int, surplus: bool) -> None:
        """The pool drops this block now; its bytes may be read until ``demoter.copied``. One that is
        ``surplus`` is not worth host memory."""
        assert self.pool is not None
        if self.slot_of(key) is None and key not in self.demoter.coming and not surplus:
            if self.demoter.take(key, parent, block):
                self.make_headroom()
            else:
                metrics.REFUSED_BLOCKS.inc()
        tier = self._tier_below(key)
        reason = "surplus" if surplus else "dropped" if tier is None else "below"
        metrics.evicted_blocks("pool", reason).inc()
        if tier is None:
            self._lost(key)
        else:
            self._on_change(key, tier)

    def announce(self, key: BlockKey) -> None:
        """Say where the block is now."""
        tier = self.tier_of(key)
        if tier is None:
            self._lost(key)
        else:
            self._on_change(key, tier)

    def remove_from_host(self, keys: Sequence[BlockKey]) -> list[BlockKey]:
        """Drop blocks with what follows them. Returns those, to be announced."""
        gone: dict[BlockKey, None] = {}
        for key in keys:
            self.demoter.forget(key)
            if self.writer is not None:
                self.writer.forget(key)
            gone |= dict.fromkeys([*self.host.remove(key), key])
        return list(gone)

    def drop_corrupt(self, key: BlockKey) -> None:
        """The copy in host memory is not what was put."""
        metrics.CORRUPT_BLOCKS.labels("host").inc()
        for gone in self.remove_from_host([key]):
            self.announce(gone)

    def make_headroom(self) -> None:
        """Host memory has got blocks. Write-back: evict ahead of need, through the disk's queue, so that
        there is room at once."""
        writer = self.writer
        if writer is None or self._write_policy != "write-back":
            return
        while self.host.num_free + len(writer.leaving) < self._num_reserve and writer.takes_more:
            self._takes_over = True
            try:
                if not self.host.evict():
                    return
            finally:
                self._takes_over = False

    def _evicted_from_host(self, key: BlockKey, slot: int) -> None:
        """Called by the host tier while the block is still there."""
        reason = "dropped"
        if self.pool is not None and key in self.pool:
            reason = "above"
        elif self.disk is not None and key in self.disk:
            reason = "below"
            self._on_change(key, Tier.SSD)
        elif key in self.host.surplus:
            reason = "surplus"
            self._lost(key, in_host=True)
        elif self._takes_over and self.writer is not None:
            reason = "written"
            self.writer.take_over(key, self.host.parent_of(key), slot)
        else:
            self._lost(key, in_host=True)
        metrics.evicted_blocks("host", reason).inc()

    def _demoted(self, key: BlockKey) -> None:
        """A block on its way from the pool has come to host memory, or found no room there."""
        if key not in self.host:
            metrics.REFUSED_BLOCKS.inc()
        self.announce(key)
        self.make_headroom()

    def _dropped_by_disk(self, keys: Sequence[BlockKey], reason: str) -> None:
        metrics.EVICTED_BLOCKS.labels("ssd", reason).inc(len(keys))
        if reason == "corrupt":
            metrics.CORRUPT_BLOCKS.labels("ssd").inc()
        for key in keys:
            self.announce(key)

    def _lost(self, key: BlockKey, *, in_host: bool = False) -> None:
        """No tier holds the block any more: nobody reaches what follows it, so that goes too.

        ``in_host``: the host tier is about to forget it, as the last of its chain there.
        """
        self._on_change(key, None)
        orphans = [] if in_host else self.host.after(key)
        orphans += self.demoter.give_up(key)
        if self.writer is not None:
            orphans += self.writer.give_up(key)
        for orphan in orphans:
            self.host.remove(orphan)
            metrics.EVICTED_BLOCKS.labels("host", "orphaned").inc()
            self.announce(orphan)

    def check_integrity(self) -> None:
        """Assert what this class promises; when nothing is under way."""
        self.host.check_integrity()
        assert not self.demoter.coming, "something is under way"
        for key in list(self.host.keys()):
            parent = self.host.parent_of(key)
            assert parent is None or self.is_held(parent), "a block in host memory nobody can reach"
        if self.writer is not None:
            self.writer.check_integrity()
        if self.disk is not None:
            self.disk.check_integrity()
