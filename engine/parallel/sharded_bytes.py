"""The bytes of blocks that lie in parts with several ranks, in memory that all of them share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import xxhash

from kvstore.layout import KVLayout
from kvstore.shards import BlockShard, Run, canonical_runs, parts
from kvstore.store import Bytes


class ShardedBytes:
    """See ``BlockBytes``. Outside the pool a block is whole, so that it serves any plan."""

    in_main_memory = False

    def __init__(self, layout: KVLayout, shards: Sequence[BlockShard], pools: Sequence[Bytes]) -> None:
        """pools: uint8 [num_blocks, block_nbytes of the shard], one for each shard."""
        self._layout = layout
        self._pools = list(pools)
        # Reading takes one copy of each byte, in order; writing reaches all copies.
        self._reads = canonical_runs(layout, shards)
        whole = BlockShard.whole(layout)
        self._writes: list[tuple[int, Run]] = [
            (i, run)
            for i, shard in enumerate(shards)
            for part in parts(layout, [whole], shard)
            for run in part.runs
        ]

    def view(self, block_id: int) -> Bytes:
        whole: Bytes = np.empty(self._layout.block_nbytes, np.uint8)
        self._gather(block_id, whole)
        return whole

    def copy_out(self, block_ids: Sequence[int], destinations: Sequence[Bytes]) -> list[int]:
        for block, destination in zip(block_ids, destinations, strict=True):
            self._gather(block, destination)
        return [xxhash.xxh3_64_intdigest(destination.data) for destination in destinations]

    def copy_in(
        self, sources: Sequence[Bytes], block_ids: Sequence[int], checksums: Sequence[int]
    ) -> int | None:
        for i, (source, block) in enumerate(zip(sources, block_ids, strict=True)):
            for shard, run in self._writes:
                into = self._pools[shard][block, run.target : run.target + run.nbytes]
                np.copyto(into, source[run.source : run.source + run.nbytes])
            # Of what arrived, that is of one copy of each byte.
            if self._checksum(block) != checksums[i]:
                return i
        return None

    def checksums(self, block_ids: Sequence[int]) -> list[int]:
        return [self._checksum(block) for block in block_ids]

    def _checksum(self, block_id: int) -> int:
        digest = xxhash.xxh3_64()
        for piece in self._pieces(block_id):
            digest.update(piece.data)
        return digest.intdigest()

    def _gather(self, block_id: int, whole: Bytes) -> None:
        end = 0
        for piece in self._pieces(block_id):
            begin, end = end, end + len(piece)
            np.copyto(whole[begin:end], piece)

    def _pieces(self, block_id: int) -> Iterator[Bytes]:
        """The block in the order of its bytes."""
        for shard, run in self._reads:
            yield self._pools[shard][block_id, run.source : run.source + run.nbytes]
