"""The memory behind a BlockPool, for peers and for the store: spans of one registered region, checksums."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from moonpool.engine.memory.block_bytes import BlockBytes
from moonpool.engine.memory.block_pool import BlockPool
from moonpool.kvstore.blocks.keys import BlockKey
from moonpool.kvstore.blocks.layout import KVLayout
from moonpool.kvstore.store import Bytes
from moonpool.protos import node_pb2
from moonpool.runtime.cancellation import outlast
from moonpool.transfer import Region, Span

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


class BlockMemory:
    """Block ``i`` of ``pool`` is bytes ``[i * block_nbytes, (i + 1) * block_nbytes)`` of ``region``.

    Implements ``kvstore.store.PoolTier``.
    """

    def __init__(self, pool: BlockPool, region: Region, layout: KVLayout, bytes_: BlockBytes) -> None:
        self.pool = pool
        self.region = region
        self.layout = layout
        self.bytes = bytes_
        self.in_main_memory, self.needs_loop = bytes_.in_main_memory, bytes_.needs_loop
        self.bytes_of, self.copy_out = bytes_.view, bytes_.copy_out
        self.block_of, self.acquire, self.release = pool.block_of, pool.acquire, pool.release
        self.generation_of = pool.generation_of
        # Of sealed blocks only: their bytes do not change while they keep their key.
        self._checksums: dict[int, int] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="moonpool-blocks")

    async def close(self) -> None:
        """Call it when no other call is running. The loop continues: calls may need it."""
        await self.bytes.close()
        await asyncio.to_thread(self._thread.shutdown)

    def __contains__(self, key: object) -> bool:
        return self.pool.block_of(key) is not None

    def keys(self) -> Iterable[BlockKey]:
        return (key for _, key in self.pool.sealed())

    def parent_of(self, key: BlockKey) -> BlockKey | None:
        return self.pool.parent_of(self._sealed_block(key))

    def lineage(self, key: BlockKey) -> list[int]:
        return self.pool.lineage(self._sealed_block(key))

    def known_checksum(self, block_id: int) -> int | None:
        """Return the checksum of a sealed block if it was computed before."""
        return self._checksums.get(block_id)

    async def checksums(self, block_ids: Sequence[int]) -> list[int]:
        """Return ``checksum`` of blocks that the caller has acquired. GPU blocks are hashed on a thread."""
        if self.in_main_memory:
            return [self.checksum(block) for block in block_ids]
        keys = {block: self.pool.key_of(block) for block in block_ids if block not in self._checksums}
        found: dict[int, int] = {}
        if keys:
            found = dict(zip(keys, await self._on_thread(self.bytes.checksums, list(keys)), strict=True))
        for block, value in found.items():
            if keys[block] is not None and keys[block] == self.pool.key_of(block):
                self._checksums[block] = value
        return [found[block] if block in found else self._checksums[block] for block in block_ids]

    def _sealed_block(self, key: BlockKey) -> int:
        block = self.pool.block_of(key)
        assert block is not None, "the pool has no block with this key"
        return block

    def span(self, block_id: int) -> Span:
        nbytes = self.layout.block_nbytes
        return Span(self.region.id, block_id * nbytes, nbytes)

    def checksum(self, block_id: int) -> int:
        """Return xxh3-64 of a block in main memory; elsewhere call ``checksums``."""
        known = self._checksums.get(block_id)
        if known is not None:
            return known
        (value,) = self.bytes.checksums((block_id,))
        if self.pool.key_of(block_id) is not None:
            self._checksums[block_id] = value
        return value

    async def hash(self, block_ids: Sequence[int]) -> list[int]:
        """Return xxh3-64 of the current bytes, computed on a thread and not cached."""
        return await self._on_thread(self.bytes.checksums, list(block_ids))

    async def copy_in(
        self, sources: Sequence[Bytes], block_ids: Sequence[int], checksums: Sequence[int]
    ) -> int | None:
        """Run ``BlockBytes.copy_in`` on a thread."""
        return await self._on_thread(self.bytes.copy_in, sources, block_ids, checksums)

    async def _on_thread(
        self, call: Callable[Parameters, Result], *args: Parameters.args, **kwargs: Parameters.kwargs
    ) -> Result:
        """A cancellation waits for the end of the call."""
        running = asyncio.get_running_loop().run_in_executor(self._thread, lambda: call(*args, **kwargs))
        return await outlast(running)

    def forget(self, block_id: int) -> None:
        """Drop the checksum of a block that is about to lose its key."""
        self._checksums.pop(block_id, None)

    async def describe(self, block_ids: Iterable[int]) -> node_pb2.BlockSpans:
        """Return spans and checksums of acquired blocks, for a peer that reads them."""
        blocks = list(block_ids)
        nbytes = self.layout.block_nbytes
        return node_pb2.BlockSpans(
            region=[self.region.id] * len(blocks),
            offset=[block * nbytes for block in blocks],
            checksum=await self.checksums(blocks),
        )
