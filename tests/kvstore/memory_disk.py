"""A disk tier in memory, for laws that do not depend on the disk; it can refuse, stall and lose."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import numpy as np
from xxhash import xxh3_64_intdigest

from moonpool.kvstore.blocks.keys import BlockKey
from moonpool.kvstore.eviction import make_policy
from moonpool.kvstore.eviction.chain_cache import ChainCache
from moonpool.kvstore.store import Bytes


class MemoryDisk:
    def __init__(self, num_blocks: int) -> None:
        self.on_dropped: Callable[[Sequence[BlockKey], str], None] | None = None
        self._stalls = asyncio.Event()
        self.refuses = False
        self.may_write = asyncio.Event()  # cleared: writes wait
        self.may_write.set()
        self.may_read = asyncio.Event()  # cleared: reads end later
        self.may_read.set()
        self.num_reads = 0
        self.bytes: dict[BlockKey, Bytes] = {}
        self._checksums: dict[BlockKey, int] = {}
        self._cache: ChainCache[BlockKey] = ChainCache(
            num_blocks, make_policy("lru", num_blocks), on_evicted=lambda key, slot: self._evicted.append(key)
        )
        self._evicted: list[BlockKey] = []

    @property
    def is_stalled(self) -> bool:
        return self._stalls.is_set()

    @is_stalled.setter
    def is_stalled(self, stalls: bool) -> None:
        """Writes that wait end without effect when the disk begins to stall."""
        if stalls:
            self._stalls.set()
        else:
            self._stalls.clear()

    @property
    def capacity(self) -> int:
        return self._cache.capacity

    async def provide(self, num_blocks: int) -> None:
        pass

    def __contains__(self, key: object) -> bool:
        return key in self._cache

    def __len__(self) -> int:
        return len(self._cache)

    def keys(self) -> list[BlockKey]:
        return list(self._cache.keys())

    def parent_of(self, key: BlockKey) -> BlockKey | None:
        return self._cache.parent_of(key)

    def checksum_of(self, key: BlockKey) -> int:
        return self._checksums[key]

    def use(self, keys: Sequence[BlockKey]) -> int:
        return self._cache.use(keys)

    async def put(
        self,
        keys: Sequence[BlockKey],
        sources: Sequence[memoryview],
        *,
        parents: Sequence[BlockKey | None],
        checksums: Sequence[int | None],
    ) -> list[bool]:
        await asyncio.sleep(0)
        await self._may_write_or_stalls()
        if self.is_stalled:
            return [key in self._cache for key in keys]
        kept = []
        for key, source, parent, checksum in zip(keys, sources, parents, checksums, strict=True):
            fits = not self.refuses and (parent is None or parent in self._cache)
            if fits and key not in self._cache:
                fits = self._cache.add(key, parent) is not None
                if fits:
                    self.bytes[key] = np.frombuffer(source, np.uint8).copy()
                    self._checksums[key] = xxh3_64_intdigest(source) if checksum is None else checksum
            kept.append(fits)
        self._drop(self._evicted, "evicted")
        self._evicted = []
        return kept

    async def _may_write_or_stalls(self) -> None:
        waits = [asyncio.ensure_future(event.wait()) for event in (self.may_write, self._stalls)]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()

    async def get(self, keys: Sequence[BlockKey], destinations: Sequence[memoryview]) -> list[bool]:
        await asyncio.sleep(0)
        self.num_reads += len(keys)
        filled = []
        for key, destination in zip(keys, destinations, strict=True):
            good = key in self._cache and self._is_intact(key) and not self.is_stalled
            if good:
                np.copyto(np.frombuffer(destination, np.uint8), self.bytes[key])
            elif key in self._cache and not self.is_stalled:
                self._drop(self._cache.remove(key), "corrupt")
            filled.append(good)
        await self.may_read.wait()
        return filled

    async def verify(self, keys: Sequence[BlockKey]) -> list[bool]:
        good = [self._is_intact(key) for key in keys]
        for key, intact in zip(keys, good, strict=True):
            if not intact and key in self._cache:
                self._drop(self._cache.remove(key), "corrupt")
        return good

    async def remove(self, keys: Sequence[BlockKey]) -> list[BlockKey]:
        return [gone for key in keys for gone in self._cache.remove(key)]

    def _is_intact(self, key: BlockKey) -> bool:
        return xxh3_64_intdigest(self.bytes[key].data) == self._checksums[key]

    def _drop(self, keys: list[BlockKey], reason: str) -> None:
        if keys and self.on_dropped is not None:
            self.on_dropped(keys, reason)

    def check_integrity(self) -> None:
        self._cache.check_integrity()
        for key in self.keys():
            parent = self._cache.parent_of(key)
            assert parent is None or parent in self._cache, "a block on disk without the one before it"

    async def close(self) -> None:
        pass
