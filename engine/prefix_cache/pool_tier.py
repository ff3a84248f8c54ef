"""The engine's pool as the store's fastest tier."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from moonpool.engine.memory.block_memory import BlockMemory
from moonpool.kvstore.blocks.keys import BlockKey
from moonpool.kvstore.store import Bytes


class PoolTier:
    """What ``kvstore.store.PoolTier`` asks for, over a BlockPool and its bytes."""

    def __init__(self, memory: BlockMemory) -> None:
        self._memory = memory
        self._pool = memory.pool

    @property
    def in_main_memory(self) -> bool:
        return self._memory.bytes.in_main_memory

    @property
    def needs_loop(self) -> bool:
        return self._memory.bytes.needs_loop

    def __contains__(self, key: object) -> bool:
        return self._pool.block_of(key) is not None

    def keys(self) -> Iterable[BlockKey]:
        return (key for _, key in self._pool.sealed())

    def block_of(self, key: BlockKey) -> int | None:
        return self._pool.block_of(key)

    def parent_of(self, key: BlockKey) -> BlockKey | None:
        return self._pool.parent_of(self._block(key))

    def lineage(self, key: BlockKey) -> list[int]:
        return self._pool.lineage(self._block(key))

    def bytes_of(self, block: int) -> Bytes:
        return self._memory.bytes.view(block)

    def copy_out(self, blocks: Sequence[int], destinations: Sequence[Bytes]) -> list[int]:
        return self._memory.bytes.copy_out(blocks, destinations)

    async def checksums(self, blocks: Sequence[int]) -> list[int]:
        return await self._memory.checksums(blocks)

    def known_checksum(self, block: int) -> int | None:
        return self._memory.known_checksum(block)

    def acquire(self, blocks: Sequence[int]) -> None:
        self._pool.acquire(blocks)

    def release(self, blocks: Sequence[int]) -> None:
        self._pool.release(blocks)

    def _block(self, key: BlockKey) -> int:
        block = self._pool.block_of(key)
        assert block is not None, "the pool was asked about a block it does not hold"
        return block
