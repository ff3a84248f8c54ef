"""The engine's pool as the store sees it, without the engine."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

import numpy as np
from xxhash import xxh3_64_intdigest

from moonpool.kvstore.blocks.keys import BlockKey
from moonpool.kvstore.store import Bytes, TieredStore
from moonpool.runtime.errors import MoonpoolError


class FakePool:
    """Holds what ``seal`` gave it until ``evict``, which takes the end of a chain and tells the store."""

    def __init__(
        self, blocks: Iterable[Bytes] = (), *, loop: asyncio.AbstractEventLoop | None = None
    ) -> None:
        """``blocks``: there from the beginning, without keys. ``loop``: the pool is where only that loop can
        have bytes fetched from, while another thread waits."""
        self._loop = loop
        self.in_main_memory, self.needs_loop = loop is None, loop is not None
        self.failing: MoonpoolError | None = None
        self.store: TieredStore | None = None
        self._blocks: list[Bytes] = list(blocks)
        self._block_of: dict[BlockKey, int] = {}
        self._parents: dict[BlockKey, BlockKey | None] = {}
        self._holds: dict[int, int] = {}

    def seal(self, key: BlockKey, parent: BlockKey | None, content: Bytes) -> None:
        if key not in self._block_of:
            assert parent is None or parent in self._block_of
            self._block_of[key], self._parents[key] = len(self._blocks), parent
            self._blocks.append(content.copy())
            assert self.store is not None
            self.store.sealed(key)

    def evict(self, key: BlockKey) -> bool:
        """Evict the end of the chain that goes through ``key``; False when it is pinned."""
        assert self.store is not None
        while child := next((k for k, parent in self._parents.items() if parent == key), None):
            key = child
        block = self._block_of[key]
        if self._holds.get(block):
            return False
        # The order the engine's pool keeps: the block is still there while its owner hears of it.
        parent, content = self._parents[key], self._blocks[block]
        del self._block_of[key], self._parents[key]
        self.store.demote(key, parent, block)
        if self._loop is None:
            content[:] = 0
        return True

    def generation_of(self, block: int) -> int:
        return 0  # no block is used twice

    @property
    def num_holds(self) -> int:
        return sum(self._holds.values())

    def __contains__(self, key: object) -> bool:
        return key in self._block_of

    def keys(self) -> Iterable[BlockKey]:
        return self._block_of.keys()

    def block_of(self, key: BlockKey) -> int | None:
        return self._block_of.get(key)

    def parent_of(self, key: BlockKey) -> BlockKey | None:
        return self._parents[key]

    def lineage(self, key: BlockKey) -> list[int]:
        blocks: list[int] = []
        here: BlockKey | None = key
        while here is not None:
            blocks.append(self._block_of[here])
            here = self._parents[here]
        return blocks[::-1]

    def bytes_of(self, block: int) -> Bytes:
        assert self.in_main_memory
        return self._blocks[block]

    def copy_out(self, blocks: Sequence[int], destinations: Sequence[Bytes]) -> list[int]:
        if self.failing is not None:
            raise self.failing
        if self._loop is not None:
            asyncio.run_coroutine_threadsafe(asyncio.sleep(0), self._loop).result(60)
        for block, destination in zip(blocks, destinations, strict=True):
            destination[:] = self._blocks[block]
        return [xxh3_64_intdigest(destination.data) for destination in destinations]

    async def checksums(self, blocks: Sequence[int]) -> list[int]:
        if self.failing is not None:
            raise self.failing
        return [xxh3_64_intdigest(np.ascontiguousarray(self._blocks[block]).data) for block in blocks]

    def known_checksum(self, block: int) -> int | None:
        return None

    def acquire(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self._holds[block] = self._holds.get(block, 0) + 1

    def release(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self._holds[block] -= 1
            assert self._holds[block] >= 0
