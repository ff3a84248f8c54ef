"""The bytes of blocks that lie in parts with several ranks, where only transfer agents reach."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import numpy as np

from moonpool.engine.errors import RankLost
from moonpool.kvstore.blocks.layout import KVLayout
from moonpool.kvstore.blocks.shards import BlockShard, Run, canonical_runs, overlaps
from moonpool.kvstore.remote.rank_reader import RankRead
from moonpool.kvstore.remote.sharded_reader import shard_of
from moonpool.kvstore.store import Bytes
from moonpool.protos import node_pb2
from moonpool.transfer import AgentClosed, AgentDescriptor, TransferAgent, checksum

Result = TypeVar("Result")

# Memory for blocks that come from, or go to, where no agent reaches: to be hashed, or to disk.
_STAGING_NBYTES = 8 << 20
# A thread that waits for the loop looks this often whether there is a loop.
_LOOK_S = 1.0


@dataclass(frozen=True, slots=True)
class _RankPart:
    """A rank: where its part of block i begins is ``i * block_nbytes`` of ``region``. The runs are (in the
    whole block, in the part, nbytes): ``reads`` of all holders take each byte once, ``writes`` reach every
    copy."""

    agent: AgentDescriptor
    region: int
    block_nbytes: int
    reads: list[tuple[int, int, int]]
    writes: list[tuple[int, int, int]]


@dataclass(frozen=True, slots=True)
class _BlockSpans:
    """Whole blocks in one region of ours."""

    region: int
    begins: list[int]


class RemoteRankBytes:
    """See ``BlockBytes``. Outside the pool a block is whole, so that it serves any plan.

    The leader's agent reads parts, and writes them, straight between the ranks' pools and memory that is
    registered with it, which the store's host memory is; all else goes by way of ``staging``. Over a network
    a write is compared at the rank with what was sent; what was sent is compared here with its checksum.
    """

    in_main_memory = False
    needs_loop = True

    def __init__(
        self,
        layout: KVLayout,
        agent: TransferAgent,
        ranks: Sequence[node_pb2.RankMemory],
        lost: Callable[[], RankLost | None],
        *,
        deadline_s: float,
    ) -> None:
        """On the loop. ``ranks``: all, rank 0 too; ``lost()``: why they are of no use any more.

        deadline_s: of each move, longer than it takes until a stopped rank is lost: one that went on after
        its write was given up could still end it.
        """
        self._layout = layout
        self._agent = agent
        self._lost = lost
        self._deadline_s = deadline_s
        self._holders = _holders(layout, ranks)
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._num_staged = max(1, _STAGING_NBYTES // layout.block_nbytes)
        self._staging = agent.allocate(self._num_staged * layout.block_nbytes, "staging")
        self._staging_lock = threading.Lock()
        self._moves: set[asyncio.Task[None]] = set()
        self._closed = False

    async def close(self) -> None:
        """See ``BlockBytes``. The agent is still open."""
        self._closed = True
        for move in self._moves:
            move.cancel()
        if self._moves:
            await asyncio.wait(self._moves)
        self._staging.close()

    def view(self, block_id: int) -> Bytes:
        whole: Bytes = np.empty(self._layout.block_nbytes, np.uint8)
        self.copy_out([block_id], [whole])
        return whole

    def copy_out(self, block_ids: Sequence[int], destinations: Sequence[Bytes]) -> list[int]:
        place = self._registered(destinations)
        if place is not None:
            self._wait(self._move("read", block_ids, place))
        else:

            def take(some: slice, staged: _BlockSpans, copies: Sequence[Bytes]) -> None:
                self._wait(self._move("read", block_ids[some], staged))
                for copy, destination in zip(copies, destinations[some], strict=True):
                    np.copyto(destination, copy)

            self._staged(len(block_ids), take)
        return [checksum(destination.data) for destination in destinations]

    def copy_in(
        self, sources: Sequence[Bytes], block_ids: Sequence[int], checksums: Sequence[int]
    ) -> int | None:
        wrong: list[int] = []

        def give(some: slice, place: _BlockSpans, given: Sequence[Bytes]) -> None:
            writing = self._begin(self._move("write", block_ids[some], place))
            try:
                # Hashed while they are on their way: what is sent is what lies there.
                promised = checksums[some]
                wrong.extend(
                    some.start + i for i, one in enumerate(given) if checksum(one.data) != promised[i]
                )
            finally:
                self._end(writing)

        place = self._registered(sources)
        if place is not None:
            give(slice(0, len(sources)), place, sources)
        else:

            def stage(some: slice, staged: _BlockSpans, copies: Sequence[Bytes]) -> None:
                for copy, source in zip(copies, sources[some], strict=True):
                    np.copyto(copy, source)
                give(some, staged, copies)

            self._staged(len(sources), stage)
        return wrong[0] if wrong else None

    def checksums(self, block_ids: Sequence[int]) -> list[int]:
        found: list[int] = []

        def look(some: slice, staged: _BlockSpans, copies: Sequence[Bytes]) -> None:
            self._wait(self._move("read", block_ids[some], staged))
            found.extend(checksum(copy.data) for copy in copies)

        self._staged(len(block_ids), look)
        return found

    # ------------------------------------------------------------------ whole blocks in memory of ours

    def _registered(self, arrays: Sequence[Bytes]) -> _BlockSpans | None:
        """Where the arrays lie, if all of them are in one region of the agent's."""
        if not arrays:
            return _BlockSpans(self._staging.id, [])
        begins = [array.__array_interface__["data"][0] for array in arrays]
        last = max(begins) + self._layout.block_nbytes
        for region in self._agent.regions:
            inside = region.address <= min(begins) and last <= region.address + region.nbytes
            if inside and region.device is None:
                return _BlockSpans(region.id, [begin - region.address for begin in begins])
        return None

    def _staged(self, num_blocks: int, work: Callable[[slice, _BlockSpans, Sequence[Bytes]], None]) -> None:
        """Call ``work`` with so many blocks at a time as staging holds, and where they may be."""
        nbytes = self._layout.block_nbytes
        with self._staging_lock:
            if self._closed:
                raise AgentClosed(self._agent.agent_id)
            array = self._staging.array.reshape(self._num_staged, nbytes)
            for first in range(0, num_blocks, self._num_staged):
                n = min(self._num_staged, num_blocks - first)
                place = _BlockSpans(self._staging.id, [i * nbytes for i in range(n)])
                work(slice(first, first + n), place, list(array[:n]))

    # ------------------------------------------------------------------ from a thread to the loop

    def _wait(self, move: Coroutine[Any, Any, None]) -> None:
        self._end(self._begin(move))

    def _begin(self, move: Coroutine[Any, Any, None]) -> concurrent.futures.Future[None]:
        if threading.get_ident() == self._loop_thread:
            move.close()
            raise AssertionError("the loop would wait for itself: blocks of ranks apart move on threads only")
        if self._closed or not self._loop.is_running():
            move.close()
            raise AgentClosed(self._agent.agent_id)
        return asyncio.run_coroutine_threadsafe(move, self._loop)

    def _end(self, moving: concurrent.futures.Future[None]) -> None:
        """When it has ended, which its deadline sees to, or the loop has."""
        while not concurrent.futures.wait((moving,), _LOOK_S).done:
            if not self._loop.is_running():
                raise AgentClosed(self._agent.agent_id)
        try:
            moving.result()
        except concurrent.futures.CancelledError:
            raise AgentClosed(self._agent.agent_id) from None

    # ------------------------------------------------------------------ on the loop

    async def _move(
        self, direction: Literal["read", "write"], block_ids: Sequence[int], place: _BlockSpans
    ) -> None:
        """Between blocks and whole ones in our memory. However it ends, nothing moves any more then."""
        if (lost := self._lost()) is not None:
            raise lost
        if self._closed:
            raise AgentClosed(self._agent.agent_id)
        moves = [
            self._loop.create_task(self._move_part(direction, holder, block_ids, place))
            for holder in self._holders
            if block_ids and (holder.reads if direction == "read" else holder.writes)
        ]
        self._moves.update(moves)
        try:
            # Also when one has failed: the others may be writing to what we would take for something else.
            ended = await asyncio.gather(*moves, return_exceptions=True)
        except asyncio.CancelledError:
            for move in moves:
                move.cancel()
            await asyncio.wait(moves)
            raise
        finally:
            self._moves.difference_update(moves)
        for error in ended:
            if error is not None:
                raise self._lost() or error

    async def _move_part(
        self,
        direction: Literal["read", "write"],
        holder: _RankPart,
        block_ids: Sequence[int],
        place: _BlockSpans,
    ) -> None:
        """One rank's part."""
        loop = self._loop
        ends_s = loop.time() + self._deadline_s
        peer = await self._agent.connect(holder.agent, deadline_s=self._deadline_s)
        theirs = [block * holder.block_nbytes for block in block_ids]
        left_s = max(ends_s - loop.time(), 1e-3)
        if direction == "read":
            into = [(theirs_at, ours_at, n) for ours_at, theirs_at, n in holder.reads]
            read = RankRead(b"", holder.region, theirs, place.begins, into, left_s)
            ours, remote = read.spans(place.region)
            await peer.read(ours, remote, deadline_s=left_s)
        else:
            read = RankRead(b"", place.region, place.begins, theirs, holder.writes, left_s)
            remote, ours = read.spans(holder.region)
            await peer.write(ours, remote, deadline_s=left_s)


def _holders(layout: KVLayout, ranks: Sequence[node_pb2.RankMemory]) -> list[_RankPart]:
    shards = [shard_of(rank) for rank in ranks]
    reads: list[list[Run]] = [[] for _ in ranks]
    for number, run in canonical_runs(layout, shards):
        reads[number].append(run)
    whole = BlockShard.whole(layout)
    return [
        _RankPart(
            AgentDescriptor.unpack(rank.agent),
            rank.region,
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
