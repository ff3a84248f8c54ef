"""What bounds blocks between ranks of one machine: as many bytes, in as many runs, copied in one process."""

from __future__ import annotations

import os
import threading
import time
from itertools import pairwise

import numpy as np

from moonpool.engine.node.engine_memory import EngineMemory
from moonpool.kvstore.blocks.shards import BlockShard, overlaps
from moonpool.transfer import move_runs


class Pools:
    """Memory of this process as a node's ranks have it, for as many blocks."""

    def __init__(self, node: EngineMemory, num_blocks: int) -> None:
        self.layout = node.engine.layout
        self.shards = [BlockShard(shard.layers, shard.kv_heads) for shard in node.engine.shards]
        # All pages there.
        self.arrays = [
            np.ones(num_blocks * shard.block_nbytes(self.layout), np.uint8) for shard in self.shards
        ]

    def place(self, rank: int, offset: int) -> int:
        return int(self.arrays[rank].__array_interface__["data"][0]) + offset


class RunCopy:
    """Copies the runs that go from one node's pools to another's, and checksums them."""

    def __init__(self, source: Pools, target: Pools, num_blocks: int) -> None:
        # Whose memory it is that the addresses below are of.
        self._pools = source, target
        layout, theirs, ours = source.layout, source.shards, target.shards
        self.took_s: list[float] = []
        # (to, from, bytes, bytes from block to block here, and there), of the first block.
        runs = sorted(
            (
                target.place(i, run.target),
                source.place(overlap.source, run.source),
                run.nbytes,
                shard.block_nbytes(layout),
                theirs[overlap.source].block_nbytes(layout),
            )
            for i, shard in enumerate(ours)
            for overlap in overlaps(layout, theirs, shard, i)
            for run in overlap.runs
        )
        here, there, nbytes, step_here, step_there = np.array(runs, np.uint64).T
        blocks = np.arange(num_blocks, dtype=np.uint64)[:, None]
        self._to = (here + blocks * step_here).reshape(-1)
        self._from = (there + blocks * step_there).reshape(-1)
        self._nbytes = np.tile(nbytes, num_blocks)
        self._counts = np.full(num_blocks, len(runs), np.uint32)

    def time(self) -> None:
        """With a thread a core."""
        num_threads = os.cpu_count() or 1
        num_blocks, num_runs = len(self._counts), int(self._counts[0])
        cuts = [num_blocks * i // num_threads for i in range(num_threads + 1)]
        threads = [
            threading.Thread(target=self._copy, args=(slice(*cut), num_runs)) for cut in pairwise(cuts)
        ]
        began_s = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.took_s.append(time.perf_counter() - began_s)

    def _copy(self, blocks: slice, num_runs: int) -> None:
        counts = self._counts[blocks]
        rows = slice(blocks.start * num_runs, blocks.stop * num_runs)
        digests = np.empty(len(counts), np.uint64)
        move_runs(self._to[rows], self._from[rows], self._nbytes[rows], counts, digests=digests)
