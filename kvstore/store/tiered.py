"""One node's blocks over all its tiers, behind one API."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Sequence

from moonpool.kvstore.blocks.keys import BlockKey
from moonpool.kvstore.blocks.layout import BlockFormat
from moonpool.kvstore.blocks.tier import Tier
from moonpool.kvstore.errors import BlockCorrupt
from moonpool.kvstore.eviction.savings import SavedSeconds
from moonpool.kvstore.store.leases import Lease, LeaseTable
from moonpool.kvstore.store.reader import Reader
from moonpool.kvstore.store.reservation import Reservation
from moonpool.kvstore.store.residency import OnChange, Residency
from moonpool.kvstore.store.stats import StoreStats, TierStats
from moonpool.kvstore.tiers import metrics
from moonpool.kvstore.tiers.copier import Copier
from moonpool.kvstore.tiers.protocols import Bytes, DiskTier, PoolTier
from moonpool.runtime.config.options import StoreOptions

_log = logging.getLogger(__name__)

_VERIFY_BLOCKS = 32


def _ignore_change(key: BlockKey, tier: Tier | None) -> None:
    """Who listens where nobody was named."""


class TieredStore:
    """Blocks are immutable and named by keys of chains; ``keys`` is always a run of one chain, and what the
    store holds of a chain is a prefix of it.

    Everything happens on one event loop; only the disk's reads and writes, and copies of several MiB, leave
    it. Nothing but ``get``, ``pin`` and ``prefetch`` of blocks on disk waits for the disk, and they only for
    its deadline.
    """

    def __init__(
        self,
        layout: BlockFormat,
        options: StoreOptions,
        memory: Bytes,
        *,
        pool: PoolTier | None = None,
        ssd: DiskTier | None = None,
        on_change: OnChange = _ignore_change,
        saved_s: SavedSeconds | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``memory``: uint8, the host tier; slot i is bytes ``[i * block_nbytes, (i + 1) * block_nbytes)``.
        ``ssd`` is closed by the store. ``on_change(key, tier)``: the block's fastest copy is in ``tier`` now,
        None where no copy is left. What the pool takes in, the engine says itself. ``saved_s``: what a hit in
        host memory is worth to its eviction policy.

        Raises LayoutError when ``memory`` holds no block.
        """
        self.layout = layout
        self._options = options
        self._clock = clock
        self._copier = Copier(options.host.io_threads)
        self._residency = Residency(layout, options, memory, pool, ssd, self._copier, on_change, saved_s)
        self.host = self._residency.host
        self.ssd = ssd
        self._reader = Reader(self._residency, self._copier, layout.block_nbytes, clock)
        self._leases = LeaseTable(self._reader.release, longest_s=options.lease_ttl_s, clock=clock)

    async def start(self) -> None:
        """Begin writing to disk. What the disk holds already is held from the beginning."""
        if self._residency.writer is not None:
            self._residency.writer.start()

    async def close(self) -> None:
        """End: leases lapse, the write under way is finished, the disk is closed. What only memory holds is
        lost: ``flush`` first to keep it."""
        self._leases.release_all()
        await self.copied()
        if self._residency.writer is not None:
            await self._residency.writer.close()
        if self._reader.promoter is not None:
            await self._reader.promoter.close()
        if self.ssd is not None:
            await self.ssd.close()
        await self._copier.close()

    # ------------------------------------------------------------------ what is here

    def tier_of(self, key: BlockKey) -> Tier | None:
        """The fastest tier that holds the block."""
        return self._residency.tier_of(key)

    def match(self, keys: Sequence[BlockKey]) -> list[Tier]:
        """The tier of each block of the longest prefix of ``keys`` that is held. Pins nothing, counts as no
        use."""
        return self._residency.match(keys)

    def blocks(self) -> Iterator[tuple[BlockKey, Tier]]:
        """Every block with its fastest tier, each once, in no order. Change nothing meanwhile."""
        return self._residency.blocks()

    def use(self, keys: Sequence[BlockKey], found: Sequence[Tier] | None = None) -> None:
        """A request uses this chain: what is held of it stays longer, and under ``selective`` goes to disk.
        ``found``: what ``match`` said when it came, where some time has passed since."""
        tiers = self._residency.match(keys) if found is None else found
        self._residency.used(keys, len(tiers))
        for tier in Tier:
            if count := tiers.count(tier):
                metrics.HIT_BLOCKS.labels(tier.name.lower()).inc(count)
        metrics.MISSED_BLOCKS.inc(len(keys) - len(tiers))

    # ------------------------------------------------------------------ reading

    async def get(self, keys: Sequence[BlockKey], spans: Sequence[Bytes]) -> list[Tier]:
        """Fill ``spans[i]`` (uint8 [block_nbytes]) with the block named ``keys[i]``, verified. What lies on
        disk is in host memory from then on. Returns where each was found.

        Raises:
            BlockMissing: some are not held, or could not be read in time.
            BlockCorrupt: a copy was not what had been put, and has been dropped.
        After an error the spans before its ``first_missing`` are filled, the others' bytes are undefined; a
        cancellation leaves all undefined. Nothing is written to ``spans`` once this has ended.
        """
        return await self._reader.get(keys, spans)

    async def prefetch(self, keys: Sequence[BlockKey]) -> int:
        """Bring what lies on disk of this chain to host memory, ahead of its use. Returns how many of the
        first blocks are in memory then."""
        return await self._reader.prefetch(keys)

    async def pin(self, keys: Sequence[BlockKey], ttl_s: float) -> Lease:
        """Keep the longest prefix of ``keys`` readable in memory until ``release``, for ``ttl_s`` at most
        (and ``store.lease_ttl_s``). Blocks on disk are brought to host memory first, as far as there is room.
        """
        pinned, in_pool, slots = await self._reader.pin(keys)
        if not pinned:
            return Lease(0, self._clock(), [])
        return self._leases.grant(pinned, in_pool, slots, ttl_s)

    def release(self, lease_id: int) -> None:
        """End a lease. Twice, or after it lapsed, is no error."""
        self._leases.release(lease_id)

    def sweep(self) -> int:
        """Call now and then: ends leases whose time is up; returns how many."""
        return self._leases.sweep()

    # ------------------------------------------------------------------ writing

    async def put(
        self,
        keys: Sequence[BlockKey],
        spans: Sequence[Bytes],
        *,
        parent: BlockKey | None = None,
        checksums: Sequence[int] | None = None,
    ) -> int:
        """Keep a run of blocks (uint8 [block_nbytes] each) that follows ``parent`` in its chain; None: it
        starts one. Nobody finds a block before it is complete. Blocks held already are left as they are.

        Returns how many of the first ``keys`` are held now: fewer where there is no room, none where
        ``parent`` is not held.

        Raises BlockCorrupt where ``checksums`` (xxh3-64) are given and one is not its span's. Nothing was
        kept then, nor after a cancellation.
        """
        began_s = self._clock()
        with self.reserve(keys, parent=parent) as reservation:
            new = slice(reservation.num_held, reservation.num_held + len(reservation.slots))
            if checksums is None:
                found: Sequence[int] = await self._copier.copy_and_hash(spans[new], reservation.spans)
            else:
                found = checksums[new]
                bad = await self._copier.copy(spans[new], reservation.spans, found)
                if bad is not None:
                    raise BlockCorrupt(reservation.num_held + bad, len(keys), "given")
            metrics.SECONDS.labels("host", "store").observe(self._clock() - began_s)
            return reservation.commit(found)

    def reserve(self, keys: Sequence[BlockKey], *, parent: BlockKey | None = None) -> Reservation:
        """Room in host memory for those of ``keys`` that are not held, for a writer that fills it itself."""
        return Reservation(self._residency, keys, parent)

    def sealed(self, key: BlockKey) -> None:
        """The pool holds a new block: under ``write-through`` it goes to disk."""
        self._residency.sealed(key)

    def demote(
        self,
        key: BlockKey,
        parent: BlockKey | None,
        block: int,
        *,
        surplus: bool = False,
    ) -> None:
        """The pool drops this block now: keep it in host memory, unless it is ``surplus``, a copy nobody
        needs any more. Returns at once; the block's bytes must not change before ``copied``."""
        self._residency.demote(key, parent, block, surplus)

    async def copied(self) -> None:
        """Wait until no block of ``demote`` is being read any more."""
        await self._residency.demoter.copied()

    @property
    def is_copying(self) -> bool:
        """Whether ``copied`` has anything to wait for."""
        return self._residency.demoter.is_copying

    async def remove(self, keys: Sequence[BlockKey], *, reason: str = "removed") -> list[BlockKey]:
        """Drop blocks, with what follows them, from host memory and disk; leased ones stay readable until
        their lease ends. Returns those that no tier holds any more. ``reason``: for the metrics."""
        gone = dict.fromkeys(self._residency.remove_from_host(keys))
        metrics.EVICTED_BLOCKS.labels("host", reason).inc(len(gone))
        if self.ssd is not None:
            from_disk = await self.ssd.remove(keys)
            metrics.EVICTED_BLOCKS.labels("ssd", reason).inc(len(from_disk))
            gone |= dict.fromkeys(from_disk)
        for key in gone:
            self._residency.announce(key)
        return [key for key in gone if not self._residency.is_held(key)]

    async def flush(self, within_s: float) -> None:
        """Write what only memory holds to disk, as far as there is time: for a node that is about to stop.
        Not under ``selective``, which writes what was used again and nothing else."""
        writer = self._residency.writer
        if self.ssd is None or writer is None or self._options.write_policy == "selective":
            return
        try:
            async with asyncio.timeout(within_s):
                await self.copied()
                for key, _ in list(self._residency.blocks()):
                    if key not in self.ssd and not self.ssd.is_stalled and not writer.offer(key):
                        await writer.flush()
                        self._residency.write(key)
                await writer.flush()
        except TimeoutError:
            _log.warning("%d blocks were not written to disk in the last %g s", len(writer), within_s)

    # ------------------------------------------------------------------ how it is

    @property
    def stats(self) -> StoreStats:
        host, nbytes, writer = self.host.stats, self.layout.block_nbytes, self._residency.writer
        tiers = [TierStats("host", host.num_blocks, host.num_held, host.num_pinned, host.num_held * nbytes)]
        if self.ssd is not None:
            capacity, num_blocks = self._options.ssd.capacity_nbytes // nbytes, len(self.ssd)
            tiers.append(TierStats("ssd", capacity, num_blocks, 0, num_blocks * nbytes))
        return StoreStats(
            tiers=tiers,
            num_leases=len(self._leases),
            num_queued_writes=0 if writer is None else len(writer),
            num_leaving=0 if writer is None else len(writer.leaving),
            num_promoting=0 if self._reader.promoter is None else len(self._reader.promoter),
            host_load_nbytes_per_s=self._reader.host_bandwidth.nbytes_per_s,
            ssd_load_nbytes_per_s=self._reader.disk_bandwidth.nbytes_per_s,
        )

    async def verify(self, on_progress: Callable[[int, int], None] | None = None) -> list[BlockKey]:
        """Check every block of host memory and disk against its checksum; a copy that fails is dropped.
        Returns the keys of those. ``on_progress(done, total)`` is called now and then."""
        in_host = list(self.host.keys())
        on_disk = [] if self.ssd is None else self.ssd.keys()
        total = len(in_host) + len(on_disk)
        bad: list[BlockKey] = []
        for first in range(0, total, _VERIFY_BLOCKS):
            last = min(first + _VERIFY_BLOCKS, total)
            for key in in_host[first:last]:
                slot = self.host.slot_of(key)
                if slot is not None and not self.host.is_intact(slot):
                    self._residency.drop_corrupt(key)
                    bad.append(key)
            some = on_disk[max(first - len(in_host), 0) : max(last - len(in_host), 0)]
            if self.ssd is not None and some:
                intact = await self.ssd.verify(some)
                bad += [key for key, good in zip(some, intact, strict=True) if not good]
            if on_progress is not None:
                on_progress(last, total)
            await asyncio.sleep(0)
        return bad

    def check_integrity(self) -> None:
        """Assert everything this class promises; when nothing is under way."""
        self._residency.check_integrity()
