"""The bytes of blocks in parts on several ranks, which only transfer agents reach."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Awaitable, Callable, Coroutine, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from moonpool.engine.errors import RankLost
from moonpool.engine.memory.block_bytes import BlockBytes
from moonpool.kvstore.blocks.layout import KVLayout
from moonpool.kvstore.blocks.shards import BlockShard, Run, canonical_runs, overlaps
from moonpool.kvstore.remote.rank_reader import RankRead
from moonpool.kvstore.remote.sharded_reader import shard_of
from moonpool.kvstore.store import Bytes
from moonpool.protos import node_pb2
from moonpool.runtime.cancellation import outlast
from moonpool.transfer import AgentClosed, AgentDescriptor, TransferAgent, TransferError, checksum

# Host memory for blocks on their way to a hash or to disk.
STAGING_NBYTES = 8 << 20
# How often a thread that waits for the loop checks that the loop still runs.
_CHECK_S = 1.0


@dataclass(frozen=True, slots=True)
class _RankPart:
    """A rank's parts of blocks: that of its block i begins at ``i * block_nbytes`` of ``region``.

    Runs are (offset in the block, offset in the part, nbytes). ``reads`` of the ranks of a cp rank have each
    byte once, ``writes`` have every copy.
    """

    agent: AgentDescriptor
    region: int
    cp_rank: int
    block_nbytes: int
    reads: list[tuple[int, int, int]]
    writes: list[tuple[int, int, int]]


@dataclass(frozen=True, slots=True)
class _BlockSpans:
    """Whole blocks in one region of the leader's agent."""

    region: int
    begins: list[int]


class RemoteRankBytes(BlockBytes):
    """See ``BlockBytes``. Outside the pool a block is whole, which suits any plan.

    The leader's agent moves parts directly between the ranks' pools and memory registered with it, such as
    the store's host memory. Other memory goes through staging memory. The transfer verifies writes over a
    network; sources are verified here.
    """

    needs_loop = True

    def __init__(
        self,
        layout: KVLayout,
        agent: TransferAgent,
        ranks: Sequence[node_pb2.RankMemory],
        grant: Callable[[int], Awaitable[int]],
        lost: Callable[[], RankLost | None],
        *,
        deadline_s: float,
    ) -> None:
        """Call it on the loop. ``ranks``: of all ranks, including 0. ``grant(rank)``: a new grant to
        write its region; no write under the former one lands any more; raises RankLost. ``lost()``: the error
        of a lost group. deadline_s: of each move.
        """
        self.block_nbytes = layout.block_nbytes
        self._agent = agent
        self._lost = lost
        self._deadline_s = deadline_s
        self._parts = _rank_parts(layout, ranks)
        self._cp_size = 1 + max(rank.cp_rank for rank in ranks)
        self._grant = grant
        self._grants = [0] * len(ranks)  # by rank; 0: none yet
        self._granting = [asyncio.Lock() for _ in ranks]
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._num_staged = max(1, STAGING_NBYTES // layout.block_nbytes)
        self._staging = agent.allocate(self._num_staged * layout.block_nbytes, "staging")
        self._staging_lock = threading.Lock()
        self._moves: set[asyncio.Task[None]] = set()
        self._closed = False

    async def close(self) -> None:
        """See ``BlockBytes``. Close the agent later."""
        self._closed = True
        for move in self._moves:
            move.cancel()
        if self._moves:
            await asyncio.wait(self._moves)
        self._staging.close()

    def copy_out(self, block_ids: Sequence[int], destinations: Sequence[Bytes]) -> list[int]:
        with closing(self._batches(len(block_ids), destinations)) as batches:
            for some, spans, memory in batches:
                self._wait(self._move("read", block_ids[some], spans))
                if memory is not destinations:
                    for copy, destination in zip(memory, destinations[some], strict=True):
                        np.copyto(destination, copy)
        return [checksum(destination.data) for destination in destinations]

    def copy_in(
        self, sources: Sequence[Bytes], block_ids: Sequence[int], checksums: Sequence[int]
    ) -> int | None:
        wrong: list[int] = []
        with closing(self._batches(len(sources), sources)) as batches:
            for some, spans, memory in batches:
                if memory is not sources:
                    for copy, source in zip(memory, sources[some], strict=True):
                        np.copyto(copy, source)
                writing = self._begin(self._move("write", block_ids[some], spans))
                try:
                    # Hashed during the write: the sent bytes do not change.
                    found = [checksum(one.data) for one in memory]
                    promised = zip(found, checksums[some], strict=True)
                    wrong += [some.start + i for i, (value, right) in enumerate(promised) if value != right]
                finally:
                    self._end(writing)
        return wrong[0] if wrong else None

    def checksums(self, block_ids: Sequence[int]) -> list[int]:
        found: list[int] = []
        with closing(self._batches(len(block_ids), None)) as batches:
            for some, spans, memory in batches:
                self._wait(self._move("read", block_ids[some], spans))
                found += [checksum(copy.data) for copy in memory]
        return found

    def _registered(self, arrays: Sequence[Bytes]) -> _BlockSpans | None:
        """Return the spans of the arrays if one region of the agent has all of them."""
        if not arrays:
            return _BlockSpans(self._staging.id, [])
        begins = [array.__array_interface__["data"][0] for array in arrays]
        last = max(begins) + self.block_nbytes
        for region in self._agent.regions:
            inside = region.address <= min(begins) and last <= region.address + region.nbytes
            if inside and region.device is None:
                return _BlockSpans(region.id, [begin - region.address for begin in begins])
        return None

    def _batches(
        self, num_blocks: int, arrays: Sequence[Bytes] | None
    ) -> Generator[tuple[slice, _BlockSpans, Sequence[Bytes]]]:
        """Yield (blocks, spans, memory): all ``arrays`` at once if registered, else parts in the staging
        memory.

        The staging memory is locked until the generator is closed.
        """
        spans = None if arrays is None else self._registered(arrays)
        if spans is not None and arrays is not None:
            yield slice(0, num_blocks), spans, arrays
            return
        nbytes = self.block_nbytes
        with self._staging_lock:
            if self._closed:
                raise AgentClosed(self._agent.agent_id)
            array = self._staging.array.reshape(self._num_staged, nbytes)
            for first in range(0, num_blocks, self._num_staged):
                n = min(self._num_staged, num_blocks - first)
                staged = _BlockSpans(self._staging.id, [i * nbytes for i in range(n)])
                yield slice(first, first + n), staged, list(array[:n])

    def _wait(self, move: Coroutine[Any, Any, None]) -> None:
        self._end(self._begin(move))

    def _begin(self, move: Coroutine[Any, Any, None]) -> concurrent.futures.Future[None]:
        if threading.get_ident() == self._loop_thread:
            move.close()
            raise AssertionError("call this on a thread: on the event loop it would wait for itself")
        if self._closed or not self._loop.is_running():
            move.close()
            raise AgentClosed(self._agent.agent_id)
        return asyncio.run_coroutine_threadsafe(move, self._loop)

    def _end(self, moving: concurrent.futures.Future[None]) -> None:
        """Wait for the end of the move, which its deadline bounds, or of the loop."""
        while not concurrent.futures.wait((moving,), _CHECK_S).done:
            if not self._loop.is_running():
                raise AgentClosed(self._agent.agent_id)
        try:
            moving.result()
        except concurrent.futures.CancelledError:
            raise AgentClosed(self._agent.agent_id) from None

    async def _move(
        self, direction: Literal["read", "write"], block_ids: Sequence[int], spans: _BlockSpans
    ) -> None:
        """Move all ranks' parts of blocks. Nothing moves any more when it ends, also by an error."""
        if (lost := self._lost()) is not None:
            raise lost
        if self._closed:
            raise AgentClosed(self._agent.agent_id)
        moves = [
            self._loop.create_task(self._move_part(direction, rank, part, block_ids, spans))
            for rank, part in enumerate(self._parts)
            if any(block % self._cp_size == part.cp_rank for block in block_ids)
            and (part.reads if direction == "read" else part.writes)
        ]
        self._moves.update(moves)
        try:
            # Wait for all even if one fails: the others still write to our memory.
            ended = await outlast(
                asyncio.gather(*moves, return_exceptions=True), lambda: [move.cancel() for move in moves]
            )
        finally:
            self._moves.difference_update(moves)
        for error in ended:
            if error is not None:
                raise self._lost() or error

    async def _move_part(
        self,
        direction: Literal["read", "write"],
        rank: int,
        part: _RankPart,
        block_ids: Sequence[int],
        spans: _BlockSpans,
    ) -> None:
        """Move one rank's parts."""
        loop = self._loop
        ends_s = loop.time() + self._deadline_s
        peer = await self._agent.connect(part.agent, deadline_s=self._deadline_s)
        cp_size = self._cp_size
        which = [i for i, block in enumerate(block_ids) if block % cp_size == part.cp_rank]
        theirs = [block_ids[i] // cp_size * part.block_nbytes for i in which]
        begins = [spans.begins[i] for i in which]
        left_s = max(ends_s - loop.time(), 1e-3)
        if direction == "read":
            into = [(theirs_at, ours_at, n) for ours_at, theirs_at, n in part.reads]
            read = RankRead(b"", part.region, theirs, begins, into, left_s)
            ours, remote = read.spans(spans.region)
            await peer.read(ours, remote, deadline_s=left_s)
        else:
            read = RankRead(b"", spans.region, begins, theirs, part.writes, left_s)
            remote, ours = read.spans(part.region)
            grant = self._grants[rank] or await self._new_grant(rank, 0)
            try:
                await peer.write(ours, remote, deadline_s=left_s, grant=grant)
            except TransferError:
                # It may still be on its way to blocks that others get now.
                await self._new_grant(rank, grant)
                raise

    async def _new_grant(self, rank: int, former: int) -> int:
        """The grant that replaces ``former``. When it returns, nothing is written under that."""
        async with self._granting[rank]:
            if self._grants[rank] == former:
                self._grants[rank] = await self._grant(rank)
            return self._grants[rank]


def _rank_parts(layout: KVLayout, ranks: Sequence[node_pb2.RankMemory]) -> list[_RankPart]:
    shards = [shard_of(rank) for rank in ranks]
    reads: list[list[Run]] = [[] for _ in ranks]
    for cp_rank in {rank.cp_rank for rank in ranks}:
        numbers = [number for number, rank in enumerate(ranks) if rank.cp_rank == cp_rank]
        for i, run in canonical_runs(layout, [shards[number] for number in numbers]):
            reads[numbers[i]].append(run)
    whole = BlockShard.whole(layout)
    return [
        _RankPart(
            AgentDescriptor.unpack(rank.agent),
            rank.region,
            rank.cp_rank,
            shard.block_nbytes(layout),
            [(run.target, run.source, run.nbytes) for run in runs],
            [
                (run.source, run.target, run.nbytes)
                for overlap in overlaps(layout, [whole], shard)
                for run in overlap.runs
            ],
        )
        for rank, shard, runs in zip(ranks, shards, reads, strict=True)
    ]
