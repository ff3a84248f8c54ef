"""The bytes of blocks in parts on several ranks, in shared memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moonpool.engine.memory.block_bytes import BlockBytes
from moonpool.kvstore.blocks.layout import KVLayout
from moonpool.kvstore.blocks.shards import BlockShard, Run, canonical_runs, overlaps
from moonpool.kvstore.store import Bytes
from moonpool.transfer import move_runs
from moonpool.transfer.native.arrays import U64


class SharedRankBytes(BlockBytes):
    """See ``BlockBytes``. Outside the pool a block is whole, which suits any plan."""

    def __init__(
        self, layout: KVLayout, shards: Sequence[BlockShard], pools: Sequence[Sequence[Bytes]]
    ) -> None:
        """shards: of the ranks of each cp rank. pools: theirs, by cp rank, of n: uint8 [num_blocks / n,
        block_nbytes of the shard]; block b is in those of b % n as b // n."""
        self.block_nbytes = layout.block_nbytes
        self._pools = pools
        # Reads take one copy of each byte; writes update all copies.
        self._reads = _Runs(self._pools, canonical_runs(layout, shards))
        whole = BlockShard.whole(layout)
        self._writes: list[tuple[int, Run]] = [
            (i, run)
            for i, shard in enumerate(shards)
            for overlap in overlaps(layout, [whole], shard)
            for run in overlap.runs
        ]

    def copy_out(self, block_ids: Sequence[int], destinations: Sequence[Bytes]) -> list[int]:
        return self._reads.move(block_ids, destinations)

    def copy_in(
        self, sources: Sequence[Bytes], block_ids: Sequence[int], checksums: Sequence[int]
    ) -> int | None:
        for i, (source, block) in enumerate(zip(sources, block_ids, strict=True)):
            place, cp_rank = divmod(block, len(self._pools))
            for shard, run in self._writes:
                into = self._pools[cp_rank][shard][place, run.target : run.target + run.nbytes]
                np.copyto(into, source[run.source : run.source + run.nbytes])
            # The checksum of one copy of each byte.
            if self._reads.move([block]) != [checksums[i]]:
                return i
        return None

    def checksums(self, block_ids: Sequence[int]) -> list[int]:
        return self._reads.move(block_ids)


class _Runs:
    """The runs of bytes that make a block, in order."""

    def __init__(self, pools: Sequence[Sequence[Bytes]], runs: Sequence[tuple[int, Run]]) -> None:
        first = np.array(
            [[each.__array_interface__["data"][0] for each in some] for some in pools], np.uint64
        )
        strides = np.array([pool.shape[1] for pool in pools[0]], np.uint64)
        shards = [shard for shard, _ in runs]
        # [cp ranks, runs]
        self._begins: U64 = first[:, shards] + np.array([run.source for _, run in runs], np.uint64)
        self._strides = strides[shards]
        self._offsets = np.array([run.target for _, run in runs], np.uint64)
        self._nbytes = np.array([run.nbytes for _, run in runs], np.uint64)

    def move(self, block_ids: Sequence[int], destinations: Sequence[Bytes] | None = None) -> list[int]:
        """Copy the blocks to ``destinations``, or only read them. Return their checksums."""
        num_blocks, num_runs = len(block_ids), len(self._nbytes)
        places, cp_ranks = np.divmod(np.array(block_ids, np.int64), len(self._begins))
        to = None
        if destinations is not None:
            addresses = [array.__array_interface__["data"][0] for array in destinations]
            to = (np.array(addresses, np.uint64)[:, None] + self._offsets).reshape(-1)
        digests = np.empty(num_blocks, np.uint64)
        move_runs(
            to,
            (self._begins[cp_ranks] + places.astype(np.uint64)[:, None] * self._strides).reshape(-1),
            np.tile(self._nbytes, num_blocks),
            np.full(num_blocks, num_runs, np.uint32),
            digests=digests,
        )
        found: list[int] = digests.tolist()
        return found
