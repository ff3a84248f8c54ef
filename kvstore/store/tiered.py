"""One node's blocks over all its tiers, behind one API."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from moonpool.kvstore.blocks.keys import BlockKey
from moonpool.kvstore.blocks.tier import Tier
from moonpool.kvstore.errors import BlockCorrupt
from moonpool.kvstore.store.reader import Reader
from moonpool.kvstore.store.reservation import Reservation
from moonpool.kvstore.tiers import metrics
from moonpool.kvstore.tiers.protocols import Bytes

_log = logging.getLogger(__name__)

_VERIFY_BLOCKS = 32


@dataclass(frozen=True, slots=True)
class TierStats:
    name: str  # "host", "ssd"
    capacity_blocks: int
    num_blocks: int
    num_pinned: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class StoreStats:
    tiers: list[TierStats]
    num_leases: int
    num_queued_writes: int  # blocks that wait to be written to disk
    num_demoting: int  # blocks evicted from host memory that keep their slot until they are on disk
    num_promoting: int  # blocks on their way from disk to host memory
    host_load_nbytes_per_s: float  # measured lately; 0: not known
    ssd_load_nbytes_per_s: float


class TieredStore(Reader):
    """The blocks of one node. They are immutable; ``keys`` is always a run of one chain, and of each chain
    the store holds a prefix.

    Everything runs on one event loop, except the disk's reads and writes and copies of several MiB. Only
    ``get``, ``pin`` and ``prefetch`` wait for the disk, for its deadline at most; so do ``flush`` and
    ``room``, which say so.
    """

    async def start(self) -> None:
        """Begin writing to disk. Blocks that are on disk already are held before this."""
        if self.writes is not None:
            self.writes.start()

    async def close(self) -> None:
        """End every lease, finish the writes that have begun, close the disk. Blocks that are only in memory
        are lost: ``flush`` first to keep them."""
        self.grants.release_all()
        await self.copied()
        if self.writes is not None:
            await self.writes.close()
        if self._promoter is not None:
            await self._promoter.close()
        if self.disk is not None:
            await self.disk.close()
        await self._copier.close()

    def use(self, keys: Sequence[BlockKey], found: Sequence[Tier] | None = None) -> None:
        """Record that a request uses this chain; under ``selective`` its blocks go to disk.

        ``found``: what ``match`` returned when the request arrived; None: match now.
        """
        tiers = self.match(keys) if found is None else found
        self.used(keys, len(tiers))
        for tier in Tier:
            if count := tiers.count(tier):
                metrics.HIT_BLOCKS.labels(tier.name.lower()).inc(count)
        metrics.MISSED_BLOCKS.inc(len(keys) - len(tiers))

    # ------------------------------------------------------------------ writing

    async def put(
        self,
        keys: Sequence[BlockKey],
        spans: Sequence[Bytes],
        *,
        parent: BlockKey | None = None,
        checksums: Sequence[int] | None = None,
    ) -> int:
        """Store a run of blocks (uint8 [block_nbytes] each) after ``parent`` in its chain; None: the first.
        A block is visible once it is complete. Blocks held already are not changed.

        Returns how many of the first ``keys`` are held now: fewer where there is no room, none where
        ``parent`` is not held.

        Raises ``BlockCorrupt``: one of ``checksums`` (xxh3-64) does not match its span. Nothing is stored
        then, nor after a cancellation.
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
        """Reserve host memory for those of ``keys`` that are not held; the caller fills it."""
        return Reservation(self, keys, parent)

    async def copied(self) -> None:
        """Wait until no block of ``demote`` is being read."""
        await self.demoter.copied()

    async def remove(self, keys: Sequence[BlockKey], *, reason: str = "removed") -> list[BlockKey]:
        """Drop blocks and their descendants from host memory and disk; leased ones stay readable until their
        lease ends. Returns those that no tier holds any more. ``reason``: for the metrics."""
        gone = dict.fromkeys(self.remove_from_host(keys))
        metrics.EVICTED_BLOCKS.labels("host", reason).inc(len(gone))
        for key in gone:
            self.announce(key)
        if self.disk is not None:
            gone |= dict.fromkeys(await self._remove_from_disk(keys, reason))
            if self.writes is not None and self.writes.is_writing(gone):
                # What has begun to be written would be there again.
                await self.writes.ended(gone)
                gone |= dict.fromkeys(await self._remove_from_disk(keys, reason))
        return [key for key in gone if not self.is_held(key)]

    async def _remove_from_disk(self, keys: Sequence[BlockKey], reason: str) -> list[BlockKey]:
        assert self.disk is not None
        gone = await self.disk.remove(keys)
        metrics.EVICTED_BLOCKS.labels("ssd", reason).inc(len(gone))
        for key in gone:
            self.announce(key)
        return gone

    async def flush(self, within_s: float) -> None:
        """Write the blocks that are only in memory to disk, in at most ``within_s``. Under ``selective``
        nothing is written: that policy keeps only blocks that were used again."""
        writes = self.writes
        if self.disk is None or writes is None or self._options.write_policy == "selective":
            return
        try:
            async with asyncio.timeout(within_s):
                await self.copied()
                for key, _ in list(self.blocks()):
                    if key not in self.disk and not await writes.submit(key):
                        break
                await writes.drained()
        except TimeoutError:
            _log.warning("%d blocks were not written to disk within %g s", len(writes), within_s)

    async def room(self) -> None:
        """Wait until at most half of host memory is kept until written; not while the disk stalls."""
        if self.writes is not None:
            await self.writes.room()

    # ------------------------------------------------------------------ state

    @property
    def stats(self) -> StoreStats:
        host, nbytes, writes = self.host, self.layout.block_nbytes, self.writes
        tiers = [TierStats("host", host.capacity, len(host), host.num_pinned, len(host) * nbytes)]
        if self.disk is not None:
            num_blocks = len(self.disk)
            tiers.append(TierStats("ssd", self.disk.capacity, num_blocks, 0, num_blocks * nbytes))
        return StoreStats(
            tiers=tiers,
            num_leases=len(self.grants),
            num_queued_writes=0 if writes is None else len(writes),
            num_demoting=0 if writes is None else len(writes.evicted),
            num_promoting=0 if self._promoter is None else len(self._promoter),
            host_load_nbytes_per_s=self._host_bandwidth.nbytes_per_s,
            ssd_load_nbytes_per_s=self._disk_bandwidth.nbytes_per_s,
        )

    async def verify(self) -> AsyncIterator[tuple[int, int, list[BlockKey]]]:
        """Check every block of host memory and disk against its checksum; a copy that fails is dropped.
        Yields, every few blocks, how many are done, of how many, and those that failed since."""
        in_host = list(self.host.keys())
        on_disk = [] if self.disk is None else self.disk.keys()
        total = len(in_host) + len(on_disk)
        for first in range(0, total, _VERIFY_BLOCKS):
            last, bad = min(first + _VERIFY_BLOCKS, total), list[BlockKey]()
            for key in in_host[first:last]:
                slot = self.host.slot_of(key)
                if slot is not None and not self.host.is_intact(slot):
                    self.drop_corrupt(key)
                    bad.append(key)
            some = on_disk[max(first - len(in_host), 0) : max(last - len(in_host), 0)]
            if self.disk is not None and some:
                intact = await self.disk.verify(some)
                bad += [key for key, good in zip(some, intact, strict=True) if not good]
            yield last, total, bad
            await asyncio.sleep(0)
