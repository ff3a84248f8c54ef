"""The memory behind a BlockPool, as peers and tiers see it: spans of one registered region, and checksums."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

from moonpool.engine.memory.block_bytes import BlockBytes
from moonpool.engine.memory.block_pool import BlockPool
from moonpool.kvstore.blocks.layout import KVLayout
from moonpool.kvstore.store import Bytes
from moonpool.protos import node_pb2
from moonpool.transfer import Region, Span


class BlockMemory:
    """Block ``i`` of ``pool`` is bytes ``[i * block_nbytes, (i + 1) * block_nbytes)`` of ``region``."""

    def __init__(self, pool: BlockPool, region: Region, layout: KVLayout, bytes_: BlockBytes) -> None:
        self.pool = pool
        self.region = region
        self.layout = layout
        self.bytes = bytes_
        # Of sealed blocks only: their bytes do not change while they keep their key.
        self._checksums: dict[int, int] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="moonpool-blocks")

    async def close(self) -> None:
        """When no call is under way any more. The loop goes on meanwhile: a call may need it to end."""
        await self.bytes.close()
        await asyncio.to_thread(self._thread.shutdown)

    def span(self, block_id: int) -> Span:
        nbytes = self.layout.block_nbytes
        return Span(self.region.id, block_id * nbytes, nbytes)

    def checksum(self, block_id: int) -> int:
        """xxh3-64 of the block's bytes as they are now. For what is not in main memory there is
        ``checksums``."""
        known = self._checksums.get(block_id)
        if known is not None:
            return known
        (value,) = self.bytes.checksums((block_id,))
        if self.pool.key_of(block_id) is not None:
            self._checksums[block_id] = value
        return value

    async def checksums(self, block_ids: Sequence[int]) -> list[int]:
        """The same of many blocks, held by the caller. Those of a GPU are copied and hashed on a thread."""
        if self.bytes.in_main_memory:
            return [self.checksum(block) for block in block_ids]
        keys = {block: self.pool.key_of(block) for block in block_ids if block not in self._checksums}
        found: dict[int, int] = {}
        if keys:
            unknown = list(keys)
            loop = asyncio.get_running_loop()
            values = await loop.run_in_executor(self._thread, self.bytes.checksums, unknown)
            found = dict(zip(unknown, values, strict=True))
        for block, value in found.items():
            if keys[block] is not None and keys[block] == self.pool.key_of(block):
                self._checksums[block] = value
        return [found[block] if block in found else self._checksums[block] for block in block_ids]

    async def hash(self, block_ids: Sequence[int]) -> list[int]:
        """xxh3-64 of the bytes as they are now, computed on a thread and not remembered. Cancelled, it first
        lets that end."""
        loop = asyncio.get_running_loop()
        hashing = loop.run_in_executor(self._thread, self.bytes.checksums, list(block_ids))
        try:
            return await asyncio.shield(hashing)
        except asyncio.CancelledError:
            await asyncio.wait((hashing,))
            raise

    async def copy_in(
        self, sources: Sequence[Bytes], block_ids: Sequence[int], checksums: Sequence[int]
    ) -> int | None:
        """``BlockBytes.copy_in`` on a thread. Cancelled, it first lets the copy end."""
        loop = asyncio.get_running_loop()
        copying = loop.run_in_executor(self._thread, self.bytes.copy_in, sources, block_ids, checksums)
        try:
            return await asyncio.shield(copying)
        except asyncio.CancelledError:
            await asyncio.wait((copying,))
            raise

    def known_checksum(self, block_id: int) -> int | None:
        """The checksum of a sealed block, where it was computed before."""
        return self._checksums.get(block_id)

    def forget(self, block_id: int) -> None:
        """The block is about to lose its key."""
        self._checksums.pop(block_id, None)

    async def describe(self, block_ids: Iterable[int]) -> node_pb2.BlockSpans:
        """Where the blocks, held by the caller, lie and what their bytes hash to, for a peer that will read
        them."""
        blocks = list(block_ids)
        nbytes = self.layout.block_nbytes
        return node_pb2.BlockSpans(
            region=[self.region.id] * len(blocks),
            offset=[block * nbytes for block in blocks],
            checksum=await self.checksums(blocks),
        )
