"""Blocks being put on the disk, and the segments made for them."""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import Callable, Sequence

from moonpool.kvstore.blocks.keys import BlockKey
from moonpool.kvstore.tiers.protocols import Bytes
from moonpool.kvstore.tiers.ssd.files.block_index import IndexWriteFailed
from moonpool.kvstore.tiers.ssd.jobs.disk import Disk
from moonpool.kvstore.tiers.ssd.jobs.write import WriteJob
from moonpool.kvstore.tiers.ssd.slot_map import SlotMap

log = logging.getLogger(__name__)

# After a disk had no room for another segment, ask it again this much later, not at every block.
_ROOM_RETRY_S = 30.0


class BlockWriter:
    """Many puts may run at once. A block in several of them is written once; one that continues another put's
    block is stored after it."""

    def __init__(self, slot_map: SlotMap, disk: Disk, clock: Callable[[], float]) -> None:
        self._slot_map = slot_map
        self._disk = disk
        self._clock = clock
        self._being_written: dict[BlockKey, WriteJob] = {}
        self._growing = asyncio.Lock()
        self._grow_from_s = -_ROOM_RETRY_S

    async def put(
        self,
        keys: Sequence[BlockKey],
        sources: Sequence[Bytes],
        parents: Sequence[BlockKey | None],
        checksums: Sequence[int | None],
    ) -> None:
        """Return when the admitted blocks are stored, have failed, or were given up."""
        num_new = sum(key not in self._slot_map.cache for key in keys)
        await self._grow(num_new)
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

    async def _grow(self, num_blocks: int) -> None:
        """Make segments until this many blocks need no eviction, or there are no more."""
        segments = self._disk.segments
        async with self._growing:
            while (
                self._slot_map.cache.num_free < num_blocks
                and segments.num_segments < segments.max_segments
                and self._clock() >= self._grow_from_s
                and not self._disk.is_stalled
            ):
                await self._disk.grow(self._grown)

    def _grown(self, error: OSError | IndexWriteFailed | None) -> None:
        self._slot_map.grow()
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
