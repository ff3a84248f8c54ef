"""The bytes behind a BlockPool, as peers read them: spans of one registered region, and their checksums."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from engine.block_pool import BlockPool
from kvstore.layout import KVLayout
from protos import node_pb2
from transfer import Region, Span, checksum


class BlockMemory:
    """Block ``i`` of ``pool`` is bytes ``[i * block_nbytes, (i + 1) * block_nbytes)`` of ``region``."""

    def __init__(self, pool: BlockPool, region: Region, layout: KVLayout) -> None:
        self.pool = pool
        self.region = region
        self.layout = layout
        self._blocks = region.array[: pool.num_blocks * layout.block_nbytes].reshape(pool.num_blocks, -1)
        # Of sealed blocks only: their bytes do not change while they keep their key.
        self._checksums: dict[int, int] = {}

    def span(self, block_id: int) -> Span:
        nbytes = self.layout.block_nbytes
        return Span(self.region.id, block_id * nbytes, nbytes)

    def bytes_of(self, block_id: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        """uint8 [block_nbytes], a view."""
        view: np.ndarray[tuple[int], np.dtype[np.uint8]] = self._blocks[block_id]
        return view

    def checksum(self, block_id: int) -> int:
        """xxh3-64 of the block's bytes as they are now."""
        known = self._checksums.get(block_id)
        if known is not None:
            return known
        value = checksum(self._blocks[block_id])
        if self.pool.key_of(block_id) is not None:
            self._checksums[block_id] = value
        return value

    def known_checksum(self, block_id: int) -> int | None:
        """The checksum of a sealed block, where it was computed before."""
        return self._checksums.get(block_id)

    def remember(self, block_id: int, value: int) -> None:
        """Take over the checksum a block was verified against when it arrived. Call when it is sealed."""
        self._checksums[block_id] = value

    def forget(self, block_id: int) -> None:
        """The block is about to lose its key."""
        self._checksums.pop(block_id, None)

    def describe(self, block_ids: Iterable[int]) -> node_pb2.BlockSpans:
        """Where the blocks lie and what their bytes hash to, for a peer that will read them."""
        blocks = list(block_ids)
        nbytes = self.layout.block_nbytes
        return node_pb2.BlockSpans(
            region=[self.region.id] * len(blocks),
            offset=[block * nbytes for block in blocks],
            checksum=[self.checksum(block) for block in blocks],
        )
