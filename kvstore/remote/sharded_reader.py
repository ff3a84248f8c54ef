"""Blocks between two nodes with ranks that shard them: each rank reads its bytes from the source's ranks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from moonpool.kvstore.blocks.shards import BlockShard, ShardableLayout, overlaps
from moonpool.kvstore.remote.rank_reader import AgentReader, RankRead, RankReader
from moonpool.protos import node_pb2
from moonpool.runtime.service.vital import cancel_and_wait
from moonpool.transfer import ChecksumMismatch, JointRead, TransferReport


@dataclass(frozen=True, slots=True)
class RankTarget:
    """cp_rank: of n cp ranks, block b is on those with b % n, as their block b // n."""

    shard: BlockShard
    reader: RankReader
    cp_rank: int = 0


@dataclass(frozen=True, slots=True)
class _Part:
    """The shard of some blocks in a region of an agent."""

    agent: bytes
    region: int
    shard: BlockShard


class ShardedReader:
    """``layout``: of whole blocks; ``hash_blocks``: the checksums of blocks here."""

    def __init__(
        self,
        layout: ShardableLayout,
        targets: Sequence[RankTarget],
        hash_blocks: Callable[[Sequence[int]], Awaitable[list[int]]],
    ) -> None:
        self._layout = layout
        self._targets = list(targets)
        self._cp_size = 1 + max(target.cp_rank for target in targets)
        self._hash_blocks = hash_blocks

    async def read(
        self,
        source: node_pb2.KvAddress,
        regions: Sequence[int],
        offsets: Sequence[int],
        block_ids: Sequence[int],
        *,
        deadline_s: float,
        checksums: Sequence[int] = (),
    ) -> TransferReport:
        """Fill this node's ``block_ids`` with the blocks of ``source`` at these regions and offsets, as of
        whole blocks; verify the first ones by ``checksums``.

        Raises ``TransferError`` after every read has ended; the blocks are undefined then.
        """
        began_s = time.monotonic()
        reads = self._reads(source, regions, offsets, block_ids, deadline_s)
        alone = self._targets[0].reader if len(self._targets) == 1 else None
        joint: JointRead | None = None
        if isinstance(alone, AgentReader) and len(checksums) == len(block_ids):
            # Whole blocks can be verified while several reads copy them.
            nbytes = self._layout.block_nbytes
            joint = alone.joint([block * nbytes for block in block_ids], nbytes, checksums, len(reads))
            calls = [alone.read(read, joint) for _, read in reads]
        else:
            calls = [target.reader.read(read) for target, read in reads]
        transports = await _all_of(calls)
        if joint is None or not joint.verified:
            await self._verify(block_ids, checksums)
        nbytes = sum(len(read.source_begins) * sum(n for _, _, n in read.runs) for _, read in reads)
        return TransferReport(nbytes, time.monotonic() - began_s, "+".join(sorted(set(transports))))

    async def _verify(self, block_ids: Sequence[int], checksums: Sequence[int]) -> None:
        """Verify blocks that several reads filled. Raises ``ChecksumMismatch``."""
        found = await self._hash_blocks(block_ids[: len(checksums)])
        for i, (expected, value) in enumerate(zip(checksums, found, strict=True)):
            if value != expected:
                raise ChecksumMismatch(i, expected, value)

    def _reads(
        self,
        source: node_pb2.KvAddress,
        regions: Sequence[int],
        offsets: Sequence[int],
        block_ids: Sequence[int],
        deadline_s: float,
    ) -> list[tuple[RankTarget, RankRead]]:
        pool = source.ranks[0].region if source.ranks else None
        in_parts = [i for i, region in enumerate(regions) if region == pool]
        elsewhere: dict[int, list[int]] = {}
        for i, region in enumerate(regions):
            if region != pool:
                elsewhere.setdefault(region, []).append(i)
        whole = self._layout.block_nbytes  # once, not for every block
        reads: list[tuple[RankTarget, RankRead]] = []
        # Offsets into a pool in parts are those of whole blocks of all cp ranks.
        cp_ranks = sorted({rank.cp_rank for rank in source.ranks})
        for n, cp_rank in enumerate(cp_ranks):
            which = [i for i in in_parts if offsets[i] // whole % len(cp_ranks) == n]
            begins = [offsets[i] // whole // len(cp_ranks) * whole for i in which]
            ranks = [rank for rank in source.ranks if rank.cp_rank == cp_rank]
            parts = [_Part(rank.agent, rank.region, shard_of(rank)) for rank in ranks]
            reads += self._reads_of(parts, begins, [block_ids[i] for i in which], deadline_s)
        for region, which in elsewhere.items():
            parts = [_Part(source.agent, region, BlockShard.whole(self._layout))]
            begins = [offsets[i] for i in which]
            reads += self._reads_of(parts, begins, [block_ids[i] for i in which], deadline_s)
        return reads

    def _reads_of(
        self, parts: Sequence[_Part], begins: Sequence[int], block_ids: Sequence[int], deadline_s: float
    ) -> Iterator[tuple[RankTarget, RankRead]]:
        """Read blocks that ``parts`` have together. begins: of each block, as if it were whole."""
        layout, n = self._layout, self._cp_size
        shards, whole = [part.shard for part in parts], layout.block_nbytes
        for rank, target in enumerate(self._targets):
            own = target.shard.block_nbytes(layout)
            which = [i for i, block in enumerate(block_ids) if block % n == target.cp_rank]
            if not which:
                continue
            into = [block_ids[i] // n * own for i in which]
            for overlap in overlaps(layout, shards, target.shard, rank):
                part, size = parts[overlap.source], shards[overlap.source].block_nbytes(layout)
                runs = [(run.source, run.target, run.nbytes) for run in overlap.runs]
                of_part = [begins[i] * size // whole for i in which]
                yield target, RankRead(part.agent, part.region, of_part, into, runs, deadline_s)


async def _all_of(calls: Sequence[Coroutine[Any, Any, str]]) -> list[str]:
    """Run calls together. After a failure, or any number of cancellations, raise once all have ended."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await cancel_and_wait(*tasks)


def shard_of(rank: node_pb2.RankMemory) -> BlockShard:
    return BlockShard(
        range(rank.first_layer, rank.first_layer + rank.num_layers),
        range(rank.first_head, rank.first_head + rank.num_heads),
    )


def rank_memory(shard: BlockShard, agent: bytes, region: int, cp_rank: int = 0) -> node_pb2.RankMemory:
    return node_pb2.RankMemory(
        agent=agent,
        region=region,
        first_layer=shard.layers.start,
        num_layers=len(shard.layers),
        first_head=shard.heads.start,
        num_heads=len(shard.heads),
        cp_rank=cp_rank,
    )
