"""Blocks that go to disk in one durable write, and what they need before them."""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from moonpool.kvstore.blocks.keys import BlockKey
from moonpool.kvstore.tiers import metrics
from moonpool.kvstore.tiers.copier import Copier
from moonpool.kvstore.tiers.host import HostTier
from moonpool.kvstore.tiers.protocols import Bytes, DiskTier, PoolTier


@dataclass(frozen=True, slots=True)
class Source:
    """A block, and where it is read from: ``slot`` of host memory, or ``block`` of the pool. ``bytes``: None
    where they are not in main memory."""

    key: BlockKey
    parent: BlockKey | None
    bytes: Bytes | None
    checksum: int | None
    slot: int | None = None
    block: int | None = None


class WriteBatch:
    """With each block those before it that neither the disk has nor another batch brings. All of them stay
    where they are from ``add`` until ``release``."""

    def __init__(
        self,
        disk: DiskTier,
        host: HostTier,
        pool: PoolTier | None,
        copier: Copier,
        find: Callable[[BlockKey], Source | None],
        coming: Container[BlockKey],
    ) -> None:
        """``coming``: blocks that other batches write."""
        self.asked: list[BlockKey] = []
        self._sources: dict[BlockKey, Source] = {}
        self._disk = disk
        self._host = host
        self._pool = pool
        self._copier = copier
        self._find = find
        self._coming = coming
        self._pool_blocks: list[list[int]] = []

    def __len__(self) -> int:
        return len(self._sources)

    def __iter__(self) -> Iterator[BlockKey]:
        """The blocks to be written."""
        return iter(self._sources)

    def add(self, key: BlockKey) -> bool:
        """False, and nothing is added: the block or one before it is nowhere."""
        run: list[Source] = []
        here: BlockKey | None = key
        while here is not None and not (here in self._disk or here in self._sources or here in self._coming):
            source = self._find(here)
            if source is None:
                return False
            run.append(source)
            here = source.parent
        self.asked.append(key)
        self._sources.update((source.key, source) for source in reversed(run))
        self._host.pin(source.slot for source in run if source.slot is not None)
        in_pool = next((source.key for source in run if source.slot is None), None)
        if self._pool is not None and in_pool is not None:
            lineage = self._pool.lineage(in_pool)
            self._pool.acquire(lineage)
            self._pool_blocks.append(lineage)
        return True

    async def write(self, at_once: int) -> None:
        """``at_once``: blocks in one durable write, where a single run is longer than a batch."""
        sources = list(self._sources.values())
        for first in range(0, len(sources), at_once):
            if not await self._put(sources[first : first + at_once]):
                return

    async def _put(self, sources: list[Source]) -> bool:
        blocks, checksums = await self._in_main_memory(sources)
        began_s = time.monotonic()
        kept = await self._disk.put(
            [source.key for source in sources],
            [block.data for block in blocks],
            parents=[source.parent for source in sources],
            checksums=checksums,
        )
        metrics.SECONDS.labels("ssd", "store").observe(time.monotonic() - began_s)
        metrics.WRITTEN_BLOCKS.inc(sum(kept))
        if not all(kept):
            metrics.DROPPED_WRITES.labels("disk").inc(len(kept) - sum(kept))
        return all(kept)

    async def _in_main_memory(self, sources: Sequence[Source]) -> tuple[list[Bytes], list[int | None]]:
        """The blocks' bytes, of those elsewhere a copy, and their checksums where they are known."""
        far = [source.block for source in sources if source.block is not None and source.bytes is None]
        copies = [np.empty(self._host.layout.block_nbytes, np.uint8) for _ in far]
        found: dict[int, tuple[Bytes, int]] = {}
        if far:
            pool = self._pool
            assert pool is not None
            hashed = await self._copier.run(lambda: pool.copy_out(far, copies))
            found = dict(zip(far, zip(copies, hashed, strict=True), strict=True))
        blocks: list[Bytes] = []
        checksums: list[int | None] = []
        for source in sources:
            if source.bytes is not None:
                blocks.append(source.bytes)
                checksums.append(source.checksum)
            else:
                assert source.block is not None
                copy, value = found[source.block]
                blocks.append(copy)
                checksums.append(value)
        return blocks, checksums

    def release(self) -> None:
        self._host.release(source.slot for source in self._sources.values() if source.slot is not None)
        for lineage in self._pool_blocks:
            assert self._pool is not None
            self._pool.release(lineage)
