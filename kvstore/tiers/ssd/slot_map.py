"""The blocks in the slots of the disk, and the records on disk that are out of date. No I/O; one thread."""

from __future__ import annotations

import errno
import logging
from array import array
from collections.abc import Callable, Collection, Container, Iterable, Sequence
from dataclasses import dataclass

from moonpool.kvstore.blocks.keys import BlockKey
from moonpool.kvstore.eviction import make_policy
from moonpool.kvstore.eviction.chain_cache import ChainCache
from moonpool.kvstore.eviction.savings import SavedSeconds
from moonpool.kvstore.tiers.protocols import Bytes
from moonpool.kvstore.tiers.ssd.files.record import RecoveredIndex, StaleRecord
from moonpool.kvstore.tiers.ssd.files.segments import Segments
from moonpool.kvstore.tiers.ssd.jobs.read import WantedBlock
from moonpool.kvstore.tiers.ssd.jobs.write import NewBlock, WriteJob
from moonpool.runtime.failures import FailureClass
from moonpool.runtime.observing import failures

log = logging.getLogger(__name__)

# Slots kept free, as a part of all, and at most. With as many as a batch writes, the records of evicted
# blocks are deleted in the transaction that adds the new ones, not in one before it.
_SPARE = 16
_MAX_SPARE = 64
# Errors that are not the fault of the slot.
_NOT_THE_SLOT = (errno.ENOSPC, errno.EDQUOT, errno.ENODATA)

OnDropped = Callable[[Sequence[BlockKey], str], None]


@dataclass(slots=True)
class SsdTierStats:
    """Totals of an SSD tier since it was opened."""

    num_adopted: int = 0  # blocks found when it was opened
    num_orphans: int = 0  # blocks dropped then without their predecessors
    num_lost: int = 0  # blocks dropped then without a valid record or slot
    num_stored: int = 0
    num_evictions: int = 0
    num_refusals: int = 0  # blocks refused: every block is pinned
    num_unparented: int = 0  # blocks refused: their predecessor is not here
    num_corrupt: int = 0  # blocks dropped: their checksum did not match
    num_read_errors: int = 0
    num_write_errors: int = 0
    num_no_space: int = 0  # segments that found no room on the disk
    num_stalls: int = 0
    num_given_up: int = 0  # blocks with I/O abandoned or not begun because the disk stalled


class SlotMap:
    """A block is held once it is durable. Of each chain it holds a prefix."""

    def __init__(
        self,
        segments: Segments,
        found: RecoveredIndex,
        policy: str,
        saved_s: SavedSeconds | None,
    ) -> None:
        num_spare = min(segments.max_slots // _SPARE, _MAX_SPARE)
        self.cache: ChainCache[BlockKey] = ChainCache(
            0,
            make_policy(policy, segments.max_slots - num_spare, saved_s),
            on_evicted=self._evicted,
            num_spare=num_spare,
        )
        self.counts = SsdTierStats(
            num_adopted=len(found.blocks), num_orphans=found.num_orphans, num_lost=found.num_lost
        )
        self._segments = segments
        self.on_dropped: OnDropped | None = None
        self._checksums = array("Q")
        self._sequences = array("Q")  # of the record of what a slot holds
        self._sequence = found.next_sequence
        self._evicted_now: list[BlockKey] = []  # ``on_dropped`` is still to be called for these
        self._bad: set[int] = set()  # slots that are not used again
        # Slots with an out-of-date record on disk: it is deleted before they are written.
        self._stale: dict[int, StaleRecord] = {}
        self.grow()
        self.cache.adopt((block.key, block.parent, block.slot) for block in found.blocks)
        for block in found.blocks:
            self._checksums[block.slot] = block.checksum
            self._sequences[block.slot] = block.sequence

    def grow(self) -> None:
        more = self._segments.num_slots - self.cache.capacity
        self.cache.grow(more)
        self._checksums.frombytes(bytes(8 * more))
        self._sequences.frombytes(bytes(8 * more))

    def most_blocks(self, num_slots: int) -> int:
        """Most blocks that are held at a time in this many slots."""
        return max(num_slots - self.cache.num_spare - len(self._bad), 0)

    def checksum_of(self, slot: int) -> int:
        return self._checksums[slot]

    def reserve(
        self,
        keys: Sequence[BlockKey],
        sources: Sequence[Bytes],
        parents: Sequence[BlockKey | None],
        checksums: Sequence[int | None],
        writing: Container[BlockKey],
    ) -> list[NewBlock]:
        """Reserve slots for blocks that are not held, evicting to make room; they are not visible until
        ``stored``. ``writing``: blocks reserved before and not stored yet."""
        cache, taken = self.cache, dict[BlockKey, NewBlock]()
        above = self._held_above(parents) if len(keys) > cache.num_free else []
        # Pinned, so that the chains are not evicted to make room for their own ends.
        cache.pin(above)
        for key, source, parent, checksum in zip(keys, sources, parents, checksums, strict=True):
            if key in cache or key in taken:
                continue
            if parent is not None and not (parent in cache or parent in taken or parent in writing):
                self.counts.num_unparented += 1
                continue
            slot = cache.reserve(key, parent)
            if slot is not None:
                taken[key] = NewBlock(self._sequence, key, parent, slot, source, checksum)
                self._sequence += 1
        cache.unpin(above)
        # Only now the cache has forgotten them: the store asks which tiers still hold a block.
        gone, self._evicted_now = self._evicted_now, []
        if gone and self.on_dropped is not None:
            self.on_dropped(gone, "evicted")
        return list(taken.values())

    def _held_above(self, parents: Iterable[BlockKey | None]) -> list[int]:
        """Slots of these blocks and of all their predecessors, each once."""
        slots: dict[int, None] = {}
        for parent in parents:
            here = parent
            while here is not None and (slot := self.cache.slot_of(here)) is not None and slot not in slots:
                slots[slot] = None
                here = self.cache.parent_of(here)
        return list(slots)

    def stored(self, writing: WriteJob) -> None:
        """A write has ended: durable blocks are held, the other slots are free."""
        if writing.is_invalidated:
            self.forgotten(writing.stale)
        if writing.is_committed:
            self.forgotten(writing.also_gone)
        if writing.error is not None:
            self.counts.num_write_errors += 1
            failures.count(FailureClass.STORE, "error")
            log.error(
                "%d blocks were not stored in %s: %s",
                len(writing.blocks),
                self._segments.directory,
                writing.error,
            )
        for block in writing.blocks:
            if block.error is not None:
                self._write_failed(block)
            # A put that was given up has answered that its blocks are not here, and is over: blocks that
            # became durable afterwards would be held without being in the index.
            kept = block.is_stored and not writing.batch.abandoned
            if kept and (block.parent is None or block.parent in self.cache):
                self._checksums[block.slot] = block.checksum or 0
                self._sequences[block.slot] = block.sequence
                self.cache.commit(block.slot, block.key, block.parent)
                self.counts.num_stored += 1
                continue
            if block.is_written:
                # Its record is on disk, or may be after an error.
                self._stale[block.slot] = StaleRecord(block.key, block.slot, block.sequence)
            elif block.error is None and writing.error is None:
                self.counts.num_given_up += 1
            self.cache.abandon(block.slot)

    def _write_failed(self, block: NewBlock) -> None:
        path, offset = self._segments.where(block.slot)
        self.counts.num_write_errors += 1
        failures.count(FailureClass.STORE, "error")
        log.error("%s at %d: a block could not be written: %s", path, offset, block.error)
        self._retire(block.slot, block.error)

    def wanted(self, keys: Sequence[BlockKey], into: Sequence[Bytes | None]) -> list[WantedBlock | None]:
        """What to read for each key; None: it is not held. Pins the slots; ``read`` unpins them."""
        slots = [self.cache.slot_of(key) for key in keys]
        self.cache.pin(slot for slot in slots if slot is not None)
        return [
            None if slot is None else WantedBlock(key, slot, self._checksums[slot], destination)
            for key, slot, destination in zip(keys, slots, into, strict=True)
        ]

    def read(self, blocks: Sequence[WantedBlock]) -> bool:
        """A read has ended. Returns whether bad blocks were dropped."""
        self.cache.unpin(block.slot for block in blocks)
        self.counts.num_given_up += sum(not block.outcome for block in blocks)
        num_before = len(self.cache)
        for block in blocks:
            if block.outcome in ("corrupt", "unreadable") and self.cache.slot_of(block.key) == block.slot:
                self._read_failed(block)
        return len(self.cache) < num_before

    def _read_failed(self, block: WantedBlock) -> None:
        path, offset = self._segments.where(block.slot)
        if block.error is None:
            self.counts.num_corrupt += 1
            message = "%s at %d: the bytes of block %s are not those that were stored"
            log.error(message, path, offset, block.key.hex())
        else:
            self.counts.num_read_errors += 1
            failures.count(FailureClass.STORE, "error")
            log.error("%s at %d: block %s cannot be read: %s", path, offset, block.key.hex(), block.error)
            self._retire(block.slot, block.error)
        gone = self.remove([block.key])
        if self.on_dropped is not None:
            self.on_dropped(gone, "corrupt" if block.error is None else "unreadable")

    def remove(self, keys: Iterable[BlockKey]) -> list[BlockKey]:
        """Drop blocks and their descendants. Returns the removed keys, the last of a chain first."""
        gone: list[BlockKey] = []
        for key in keys:
            if key in self.cache:
                for each in (*self.cache.after(key), key):
                    slot = self.cache.slot_of(each)
                    assert slot is not None
                    self._stale[slot] = StaleRecord(each, slot, self._sequences[slot])
                gone += self.cache.remove(key)
        return gone

    def _evicted(self, key: BlockKey, slot: int) -> None:
        self._stale[slot] = StaleRecord(key, slot, self._sequences[slot])
        self._evicted_now.append(key)

    def _retire(self, slot: int, error: OSError | None) -> None:
        if error is not None and error.errno not in _NOT_THE_SLOT:
            self._bad.add(slot)
            self.cache.retire(slot)

    def stale(self, slots: Collection[int] = ()) -> tuple[list[StaleRecord], list[StaleRecord]]:
        """Records on disk that are out of date: those of ``slots``, and all others."""
        theirs = [self._stale[slot] for slot in slots if slot in self._stale]
        others = [record for slot, record in self._stale.items() if slot not in slots]
        return theirs, others

    def forgotten(self, records: Iterable[StaleRecord]) -> None:
        for record in records:
            if self._stale.get(record.slot) == record:
                del self._stale[record.slot]

    def check_integrity(self) -> None:
        """Assert every invariant; costs time proportional to the tier."""
        self.cache.check_integrity()
        assert len(self._checksums) == self.cache.capacity == self._segments.num_slots
        for key in self.cache.keys():  # noqa: SIM118 - it is no dict
            parent = self.cache.parent_of(key)
            assert parent is None or parent in self.cache, "a block without its predecessor"
            assert self.cache.slot_of(key) not in self._stale, "a held block with a stale record"
