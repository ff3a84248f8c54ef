"""Blocks that go to disk in one durable write, and the memory their bytes are read from."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from moonpool.kvstore.blocks.keys import BlockKey
from moonpool.kvstore.tiers import metrics
from moonpool.kvstore.tiers.copier import Copier
from moonpool.kvstore.tiers.host import HostTier
from moonpool.kvstore.tiers.in_transit import InTransit
from moonpool.kvstore.tiers.protocols import Bytes, DiskTier, PoolTier


@dataclass(frozen=True, slots=True)
class EvictedBlock:
    """A block evicted from host memory. Its slot stays pinned until the block is on disk."""

    parent: BlockKey | None
    slot: int


@dataclass(frozen=True, slots=True)
class Source:
    """A block and where it is read from: ``slot`` of host memory or ``block`` of the pool.

    ``bytes`` is None where they are not in main memory.
    """

    key: BlockKey
    parent: BlockKey | None
    bytes: Bytes | None
    checksum: int | None
    slot: int | None = None
    block: int | None = None


class BlockSources:
    """The memory that blocks are written from: host memory, the pool, and slots of evicted blocks."""

    def __init__(self, host: HostTier, pool: PoolTier | None, copier: Copier) -> None:
        self.host = host
        self.evicted: InTransit[EvictedBlock] = InTransit()
        self._pool = pool
        self._copier = copier

    def find(self, key: BlockKey) -> Source | None:
        """Return where a block is read from; None: no tier in memory has it."""
        host, pool = self.host, self._pool
        evicted = self.evicted.get(key)
        slot = host.slot_of(key) if evicted is None else evicted.slot
        if slot is not None:
            parent = host.parent_of(key) if evicted is None else evicted.parent
            return Source(key, parent, host.bytes_of(slot), host.checksum_of(slot), slot)
        block = None if pool is None else pool.block_of(key)
        if pool is None or block is None:
            return None
        bytes_ = pool.bytes_of(block) if pool.in_main_memory else None
        return Source(key, pool.parent_of(key), bytes_, pool.known_checksum(block), block=block)

    def pin(self, run: Iterable[Source]) -> list[int]:
        """Keep the blocks of a run (last first) until ``release``. Returns the pool blocks pinned for it."""
        self.host.pin(source.slot for source in run if source.slot is not None)
        in_pool = next((source.key for source in run if source.slot is None), None)
        if self._pool is None or in_pool is None:
            return []
        lineage = self._pool.lineage(in_pool)
        self._pool.acquire(lineage)
        return lineage

    def release(self, sources: Iterable[Source], pool_blocks: Sequence[int]) -> None:
        self.host.unpin(source.slot for source in sources if source.slot is not None)
        if self._pool is not None and pool_blocks:
            self._pool.release(pool_blocks)

    async def in_main_memory(self, sources: Sequence[Source]) -> tuple[list[Bytes], list[int | None]]:
        """Return the blocks' bytes and known checksums; blocks outside main memory are copied there."""
        found = {source.key: (source.bytes, source.checksum) for source in sources}
        remote = [source for source in sources if source.bytes is None]
        if remote:
            pool, blocks = self._pool, [source.block for source in remote if source.block is not None]
            assert pool is not None
            copies = [np.empty(self.host.layout.block_nbytes, np.uint8) for _ in blocks]
            hashed = await self._copier.run(lambda: pool.copy_out(blocks, copies))
            keys = (source.key for source in remote)
            found |= dict(zip(keys, zip(copies, hashed, strict=True), strict=True))
        blocks_found = [each for each, _ in found.values() if each is not None]
        return blocks_found, [checksum for _, checksum in found.values()]


class WriteBatch:
    """Blocks to write, each with its predecessors that neither the disk nor another batch has.

    All of them stay where they are from ``add`` until ``release``.
    """

    def __init__(self, disk: DiskTier, sources: BlockSources, writing: Mapping[BlockKey, WriteBatch]) -> None:
        """``writing``: blocks of other batches, which began before this one."""
        self.asked: list[BlockKey] = []
        self._given = asyncio.Event()  # the disk has been asked for every block, or will not be
        self._follows: set[WriteBatch] = set()
        self._blocks: dict[BlockKey, Source] = {}
        self._disk = disk
        self._sources = sources
        self._writing = writing
        self._pool_blocks: list[int] = []

    def __len__(self) -> int:
        return len(self._blocks)

    def __iter__(self) -> Iterator[BlockKey]:
        return iter(self._blocks)

    def add(self, key: BlockKey) -> list[BlockKey] | None:
        """Add a block; returns it and the predecessors that come with it, without those on disk.

        None, and nothing is added: the block or a predecessor is nowhere.
        """
        run: list[Source] = []
        here: BlockKey | None = key
        while here is not None and not (here in self._disk or here in self._blocks):
            if (other := self._writing.get(here)) is not None:
                self._follows.add(other)
                break
            source = self._sources.find(here)
            if source is None:
                return None
            run.append(source)
            here = source.parent
        self.asked.append(key)
        self._blocks.update((source.key, source) for source in reversed(run))
        self._pool_blocks += self._sources.pin(run)
        return [source.key for source in run]

    async def write(self, at_once: int) -> None:
        """Write the blocks. ``at_once``: blocks in one durable write; a single run may be longer."""
        blocks = list(self._blocks.values())
        try:
            # The disk refuses a block before it has been asked for its predecessor.
            while self._follows:
                await self._follows.pop()._given.wait()
            for first in range(0, len(blocks), at_once):
                last = first + at_once
                if not await self._put(blocks[first:last], is_last=last >= len(blocks)):
                    return
        finally:
            self._given.set()

    async def _put(self, blocks: list[Source], *, is_last: bool) -> bool:
        bytes_, checksums = await self._sources.in_main_memory(blocks)
        if is_last:
            self._given.set()
        began_s = time.monotonic()
        stored = await self._disk.put(
            [block.key for block in blocks],
            [each.data for each in bytes_],
            parents=[block.parent for block in blocks],
            checksums=checksums,
        )
        metrics.SECONDS.labels("ssd", "store").observe(time.monotonic() - began_s)
        metrics.WRITTEN_BLOCKS.inc(sum(stored))
        if not all(stored):
            metrics.DROPPED_WRITES.labels("disk").inc(len(stored) - sum(stored))
        return all(stored)

    def release(self) -> None:
        self._sources.release(self._blocks.values(), self._pool_blocks)
