"""The tier of blocks on disk."""

from __future__ import annotations

import asyncio
import errno
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np

from moonpool.kvstore.blocks.keys import BlockKey
from moonpool.kvstore.blocks.layout import BlockFormat
from moonpool.kvstore.errors import LayoutError
from moonpool.kvstore.eviction import make_policy
from moonpool.kvstore.eviction.savings import SavedSeconds
from moonpool.kvstore.tiers.protocols import Bytes
from moonpool.kvstore.tiers.ssd.files.block_index import IndexWriteFailed
from moonpool.kvstore.tiers.ssd.files.directory import TierFormat
from moonpool.kvstore.tiers.ssd.files.startup import gc_paused, open_directory
from moonpool.kvstore.tiers.ssd.jobs.disk import Disk
from moonpool.kvstore.tiers.ssd.jobs.read import WantedBlock
from moonpool.kvstore.tiers.ssd.jobs.write import WriteJob
from moonpool.kvstore.tiers.ssd.slot_map import OnDropped, SlotMap, SsdTierStats

if TYPE_CHECKING:
    from typing_extensions import Buffer

log = logging.getLogger(__name__)

# Segment files stay open: a large tier has larger ones, not thousands.
_MIN_SEGMENT_NBYTES = 256 << 20
_MAX_SEGMENTS = 64
# After a disk had no room for another segment, ask it again this much later, not at every block.
_ROOM_RETRY_S = 30.0


class SsdTier:
    """Blocks in slots on disk. Everything is called on one event loop; only ``async`` methods use the disk.

    Of each chain it has a prefix, also after a crash. Disk errors are counted and logged and make a miss,
    never an exception.
    """

    def __init__(
        self, layout: BlockFormat, slot_map: SlotMap, disk: Disk, clock: Callable[[], float]
    ) -> None:
        self.layout = layout
        self._slot_map = slot_map
        self._cache = slot_map.cache
        self._disk = disk
        self._clock = clock
        self._being_written: dict[BlockKey, WriteJob] = {}
        self._growing = asyncio.Lock()
        self._grow_from_s = -_ROOM_RETRY_S
        self._is_full = False  # the last attempt to make a segment failed
        self._cleaning: set[asyncio.Task[bool]] = set()

    @classmethod
    async def open(
        cls,
        directory: Path,
        layout: BlockFormat,
        *,
        capacity_nbytes: int,
        segment_nbytes: int | None = None,
        threads: int = 2,
        policy: str = "lru",
        saved_s: SavedSeconds | None = None,
        io_deadline_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> SsdTier:
        """Open or create the tier in ``directory``; blocks it had before are held again.

        ``io_deadline_s``: the disk stalls when one call takes longer. ``saved_s``: what hits are worth to the
        policy.

        Raises ``SsdDirectoryInUse``, ``SsdFormatMismatch``, ``SsdUnusable``, ``LayoutError``, ``StoreError``
        (an unknown policy): nothing is open. A damaged index is no error: it is set aside and the tier starts
        empty.
        """
        make_policy(policy, 1)  # refuse an unknown name before anything is touched
        segment = segment_nbytes or max(_MIN_SEGMENT_NBYTES, -(-capacity_nbytes // _MAX_SEGMENTS))
        wanted = TierFormat(layout.fingerprint.hex(), layout.block_nbytes, segment)
        with gc_paused():
            opened = await asyncio.to_thread(open_directory, directory, wanted, capacity_nbytes)
            found = opened.found
            slot_map = await asyncio.to_thread(SlotMap, opened.segments, found, policy, saved_s)
        disk = Disk(opened, depth=threads, deadline_s=io_deadline_s, clock=clock)
        return cls(layout, slot_map, disk, clock)

    async def __aenter__(self) -> SsdTier:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Finish the I/O under way and unlock the directory. The blocks stay on disk."""
        await self._clean()
        await self._disk.close()

    @property
    def on_dropped(self) -> OnDropped | None:
        """Called with blocks that the tier drops by itself, and why: evicted, corrupt or unreadable."""
        return self._slot_map.on_dropped

    @on_dropped.setter
    def on_dropped(self, call: OnDropped | None) -> None:
        self._slot_map.on_dropped = call

    @property
    def capacity(self) -> int:
        """Most blocks that it holds at a time: in all its segments, or in those there are if the disk had no
        room for another one."""
        segments = self._disk.segments
        return self._slot_map.most_blocks(segments.num_slots) if self._is_full else self.nominal_capacity

    @property
    def nominal_capacity(self) -> int:
        """``capacity`` while the disk has room."""
        return self._slot_map.most_blocks(self._disk.segments.max_slots)

    def __contains__(self, key: object) -> bool:
        return key in self._cache

    def __len__(self) -> int:
        return len(self._cache)

    def keys(self) -> list[BlockKey]:
        """Every block, each after its predecessor."""
        return list(self._cache.keys())

    def parent_of(self, key: BlockKey) -> BlockKey | None:
        """The key before a block in its chain; None for the first."""
        return self._cache.parent_of(key)

    def checksum_of(self, key: BlockKey) -> int:
        """xxh3-64 of a block's bytes as they were put."""
        slot = self._cache.slot_of(key)
        assert slot is not None
        return self._slot_map.checksum_of(slot)

    @property
    def is_stalled(self) -> bool:
        """The disk does not answer: everything is a miss until it does."""
        return self._disk.is_stalled

    @property
    def stats(self) -> SsdTierStats:
        """A copy."""
        return replace(
            self._slot_map.counts,
            num_evictions=self._cache.num_evictions,
            num_refusals=self._cache.num_refusals,
            num_stalls=self._disk.num_stalls,
        )

    def use(self, keys: Sequence[BlockKey]) -> int:
        return self._cache.use(keys)

    async def get(self, keys: Sequence[BlockKey], destinations: Sequence[Buffer | Bytes]) -> list[bool]:
        """Read blocks, each into ``destinations[i]`` (``block_nbytes``, writable), verified.

        False is a miss: the block is not held, is corrupt or unreadable (then it and its descendants are
        dropped), or the disk stalls. Its destination is unchanged and not written later, also after a
        cancellation.
        """
        return await self._read(keys, [self._bytes(destination) for destination in destinations])

    async def verify(self, keys: Sequence[BlockKey]) -> list[bool]:
        return await self._read(keys, [None] * len(keys))

    async def _read(self, keys: Sequence[BlockKey], into: Sequence[Bytes | None]) -> list[bool]:
        wanted = self._slot_map.wanted(keys, into)
        held = [block for block in wanted if block is not None]
        if held:
            await self._disk.read(held, lambda: self._read_ended(held))
        return [block is not None and block.outcome == "intact" for block in wanted]

    def _read_ended(self, blocks: Sequence[WantedBlock]) -> None:
        if self._slot_map.read(blocks):
            # Otherwise the bad blocks would be found when the tier is opened again.
            task = asyncio.get_running_loop().create_task(self._clean())
            self._cleaning.add(task)
            task.add_done_callback(self._cleaning.discard)

    async def put(
        self,
        keys: Sequence[BlockKey],
        sources: Sequence[Buffer | Bytes],
        *,
        parents: Sequence[BlockKey | None],
        checksums: Sequence[int | None] | None = None,
    ) -> list[bool]:
        """Store blocks in one batch. True for each that is held and durable when this returns.

        ``sources[i]`` (``block_nbytes``) must not change meanwhile. ``parents[i]`` is the key before it in
        its chain, held, being put or earlier in the batch, or None: without its parent a block is refused.
        ``checksums``: xxh3-64; None: computed here. Blocks are also refused by the policy, by a tier full of
        pins, a full disk, a write error or a stalled disk. A cancelled put may or may not have happened.
        """
        num_new = sum(key not in self._cache for key in keys)
        if num_new and self._disk.is_stalled:
            self._slot_map.counts.num_given_up += num_new
        elif num_new:
            blocks = [self._bytes(source) for source in sources]
            await self._put(keys, blocks, parents, checksums or [None] * len(keys))
        return [key in self._cache for key in keys]

    async def _put(
        self,
        keys: Sequence[BlockKey],
        sources: Sequence[Bytes],
        parents: Sequence[BlockKey | None],
        checksums: Sequence[int | None],
    ) -> None:
        """Return when the admitted blocks are stored, have failed, or were given up."""
        num_new = sum(key not in self._cache for key in keys)
        await self._grow(lambda: self._cache.num_free < num_new)
        while others := [self._being_written[key] for key in keys if key in self._being_written]:
            if not await self._disk.ended(others[0].batch):
                self._slot_map.counts.num_given_up += num_new
                return
        blocks = self._slot_map.reserve(keys, sources, parents, checksums, self._being_written)
        if not blocks:
            return
        stale, also_gone = self._slot_map.stale({block.slot for block in blocks})
        before = {self._being_written[parent] for parent in parents if parent in self._being_written}

        def on_done(writing: WriteJob) -> None:
            for block in blocks:
                del self._being_written[block.key]
            self._slot_map.stored(writing)

        writing = self._disk.write(blocks, before, stale, also_gone, on_done)
        self._being_written.update((block.key, writing) for block in blocks)
        await writing.batch.wait()

    async def provide(self, num_blocks: int) -> None:
        """Make segments for this many blocks in all. Afterwards ``capacity`` is less if the disk has no room
        for them."""
        segments = self._disk.segments
        await self._grow(lambda: self._slot_map.most_blocks(segments.num_slots) < num_blocks)

    async def _grow(self, is_wanted: Callable[[], bool]) -> None:
        """Make segments as long as another one is wanted and possible."""
        segments = self._disk.segments
        async with self._growing:
            while (
                is_wanted()
                and segments.num_segments < segments.max_segments
                and self._clock() >= self._grow_from_s
                and not self._disk.is_stalled
            ):
                await self._disk.grow(self._grown)

    def _grown(self, error: OSError | IndexWriteFailed | None) -> None:
        self._slot_map.grow()
        self._is_full = error is not None
        if error is not None:
            self._grow_from_s = self._clock() + _ROOM_RETRY_S
            self._slot_map.counts.num_no_space += 1
            full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
            what = "no room for another segment" if full else "cannot make another segment"
            num_segments = self._disk.segments.num_segments
            then = f"blocks are evicted to make room in the {num_segments} there are"
            if not num_segments:
                then = f"nothing is kept on disk; it is tried again every {_ROOM_RETRY_S:g} s"
            log.error("%s: %s (%s); %s", self._disk.directory, what, error, then)

    async def remove(self, keys: Sequence[BlockKey]) -> list[BlockKey]:
        """Drop blocks and their descendants; durable when it returns or, if the disk stalls, when it answers
        again. Returns the removed keys, the last of a chain first."""
        gone = self._slot_map.remove(keys)
        await self._clean()
        return gone

    async def _clean(self) -> bool:
        _, stale = self._slot_map.stale()
        if not stale or self._disk.is_stalled:
            return not stale
        return await self._disk.forget(stale, lambda: self._slot_map.forgotten(stale))

    def _bytes(self, buffer: Buffer | Bytes) -> Bytes:
        block: Bytes = np.frombuffer(cast("Bytes", buffer), dtype=np.uint8)  # any buffer will do
        if block.nbytes != self.layout.block_nbytes:
            raise LayoutError(f"a block has {self.layout.block_nbytes} bytes, got {block.nbytes}")
        return block

    def check_integrity(self) -> None:
        self._slot_map.check_integrity()
