"""Which tier holds which block, and where a block goes that a tier evicts."""

from __future__ import annotations

from collections import deque
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
from moonpool.kvstore.tiers.write_batch import BlockSources
from moonpool.kvstore.tiers.write_queue import WriteQueue
from moonpool.runtime.config.options import StoreOptions
from moonpool.runtime.failures import FailureClass
from moonpool.runtime.observing import failures

OnChange = Callable[[BlockKey, Tier | None], None]


class Residency:
    """Together the tiers hold a prefix of every chain: the pool and the disk each do, and the predecessor of
    a block in host memory is in some tier.

    A block evicted from the pool goes to host memory. One evicted from host memory goes to disk as the write
    policy says, or is lost together with its descendants in host memory. Nothing here waits.
    """

    def __init__(
        self,
        layout: BlockFormat,
        options: StoreOptions,
        memory: Bytes,
        pool: PoolTier | None,
        disk: DiskTier | None,
        on_change: OnChange,
        saved_s: SavedSeconds | None = None,
        *,
        keep_until_written: bool = False,
    ) -> None:
        self._copier = copier = Copier(options.host.io_threads)
        self.host = HostTier(
            memory, layout, policy=options.host.policy, saved_s=saved_s, on_evicted=self._evicted_from_host
        )
        self.pool = pool
        self.disk = disk
        self.demoter = Demoter(self.host, pool, copier, self._demoted)
        self.writes: WriteQueue | None = None
        self._write_policy = options.write_policy
        self._keep_until_written = keep_until_written
        self._on_change = on_change
        self._num_reserve = round(self.host.capacity * (1 - options.host.watermark))
        self._writes_evicted = False  # blocks that host memory evicts now are written to disk
        if disk is not None:
            disk.on_dropped = self._dropped_by_disk
            self.writes = WriteQueue(
                disk,
                BlockSources(self.host, pool, copier),
                budget_nbytes=options.ssd.queue_nbytes,
                on_finished=self.announce,
                sources_settled=self.demoter.copied,
            )

    def tier_of(self, key: BlockKey) -> Tier | None:
        """The fastest tier that holds the block."""
        if self.pool is not None and key in self.pool:
            return Tier.POOL
        return self._tier_below(key)

    def is_held(self, key: BlockKey) -> bool:
        return self.tier_of(key) is not None

    def match(self, keys: Sequence[BlockKey]) -> list[Tier]:
        """The tier of each block of the longest prefix that is held. Neither pins nor counts as a use."""
        tiers: list[Tier] = []
        for key in keys:
            tier = self.tier_of(key)
            if tier is None:
                break
            tiers.append(tier)
        return tiers

    def blocks(self) -> Iterator[tuple[BlockKey, Tier]]:
        """Every block with its fastest tier, in no order. Change nothing while iterating."""
        in_pool = set() if self.pool is None else set(self.pool.keys())
        in_memory = set(self.host.keys()) | self.demoter.demoting.keys()
        if self.writes is not None:
            in_memory |= self.writes.evicted.keys()
        on_disk = () if self.disk is None else self.disk.keys()
        yield from ((key, Tier.POOL) for key in in_pool)
        yield from ((key, Tier.HOST) for key in in_memory - in_pool)
        yield from ((key, Tier.SSD) for key in on_disk if key not in in_memory and key not in in_pool)

    def slot_of(self, key: BlockKey) -> int | None:
        """The block's slot in host memory, also while it waits there to be written to disk."""
        slot = self.host.slot_of(key)
        if slot is None and self.writes is not None and (evicted := self.writes.evicted.get(key)):
            return evicted.slot
        return slot

    def _tier_below(self, key: BlockKey) -> Tier | None:
        if self.slot_of(key) is not None or key in self.demoter.demoting:
            return Tier.HOST
        return Tier.SSD if self.disk is not None and key in self.disk else None

    def stored(self, key: BlockKey) -> None:
        self.announce(key)
        if self._keep_until_written and self.writes is not None:
            self.writes.require(key)
        elif self._write_policy == "write-through":
            self.write(key)
        self.make_headroom()

    def sealed(self, key: BlockKey) -> None:
        """The pool has a new block: under ``write-through`` it goes to disk."""
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
        """Queue a block and its missing predecessors for the disk."""
        if self.writes is not None and self.disk is not None and key not in self.disk:
            self.writes.offer(key)

    def demote(self, key: BlockKey, parent: BlockKey | None, block: int, *, surplus: bool = False) -> None:
        """Keep in host memory a block that the pool drops now, unless it is ``surplus``, a copy that is no
        longer needed. Returns at once; the block's bytes must not change before ``demoter.copied``."""
        assert self.pool is not None
        if self.slot_of(key) is None and key not in self.demoter.demoting and not surplus:
            if self.demoter.add(key, parent, block):
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
        tier = self.tier_of(key)
        if tier is None:
            self._lost(key)
        else:
            self._on_change(key, tier)

    def remove_from_host(self, keys: Sequence[BlockKey]) -> list[BlockKey]:
        """Drop blocks and their descendants. Returns those, to be announced."""
        gone: dict[BlockKey, None] = {}
        for key in keys:
            self.demoter.forget(key)
            gone |= dict.fromkeys([*self._remove(key), key])
        return list(gone)

    def _remove(self, key: BlockKey) -> list[BlockKey]:
        removed = self.host.remove(key)
        if self.writes is not None:
            for each in (*removed, key):
                self.writes.forget(each)
        return removed

    def drop_corrupt(self, key: BlockKey) -> None:
        """The copy in host memory does not match its checksum."""
        metrics.CORRUPT_BLOCKS.labels("host").inc()
        failures.count(FailureClass.STORE, "corrupt")
        for gone in self.remove_from_host([key]):
            self.announce(gone)

    def make_headroom(self) -> None:
        """Under write-back, evict to disk ahead of need, so that host memory has free slots."""
        writes = self.writes
        if writes is None or self._write_policy != "write-back":
            return
        while self.host.num_free + len(writes.evicted) < self._num_reserve and writes.has_room:
            self._writes_evicted = True
            try:
                if not self.host.evict():
                    return
            finally:
                self._writes_evicted = False

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
        elif self._writes_evicted and self.writes is not None:
            reason = "written"
            self.writes.write_evicted(key, self.host.parent_of(key), slot)
        else:
            self._lost(key, in_host=True)
        metrics.evicted_blocks("host", reason).inc()

    def _demoted(self, key: BlockKey) -> None:
        """The demotion of a block from the pool has ended; host memory may have had no room."""
        if key not in self.host:
            metrics.REFUSED_BLOCKS.inc()
        self.announce(key)
        self.make_headroom()

    def _dropped_by_disk(self, keys: Sequence[BlockKey], reason: str) -> None:
        metrics.EVICTED_BLOCKS.labels("ssd", reason).inc(len(keys))
        if reason == "corrupt":
            metrics.CORRUPT_BLOCKS.labels("ssd").inc()
            failures.count(FailureClass.STORE, "corrupt")
        for key in keys:
            self.announce(key)

    def _lost(self, key: BlockKey, *, in_host: bool = False) -> None:
        """No tier holds the block any more: its descendants cannot be reached, and go too.

        ``in_host``: the host tier is about to forget it, as the last of its chain there.
        """
        self._on_change(key, None)
        # A chain can be longer than the interpreter's stack is deep.
        orphans = deque(() if in_host else self.host.after(key))
        orphans += self._drop_after(key)
        while orphans:
            orphan = orphans.popleft()
            self._remove(orphan)
            metrics.EVICTED_BLOCKS.labels("host", "orphaned").inc()
            tier = self.tier_of(orphan)
            self._on_change(orphan, tier)
            if tier is None:
                orphans += self.host.after(orphan)
                orphans += self._drop_after(orphan)

    def _drop_after(self, key: BlockKey) -> list[BlockKey]:
        """Forget the blocks in transit that directly follow ``key``. Returns those."""
        dropped = self.demoter.drop_descendants(key)
        if self.writes is not None:
            dropped += self.writes.drop_descendants(key)
        return dropped

    def check_integrity(self) -> None:
        """Assert every invariant; only while nothing is being demoted."""
        self.host.check_integrity()
        assert not self.demoter.demoting, "a block is being demoted"
        for key in list(self.host.keys()):
            parent = self.host.parent_of(key)
            assert parent is None or self.is_held(parent), "a block in host memory that cannot be reached"
        if self.writes is not None:
            self.writes.check_integrity()
        if self.disk is not None:
            self.disk.check_integrity()
