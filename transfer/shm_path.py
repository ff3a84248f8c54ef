"""Bytes between two processes of one host: reads straight from the peer's memory; writes the peer takes from
ours.
"""

from __future__ import annotations

import errno
import functools
from collections.abc import Callable

import numpy as np

from transfer.attempt import Attempt, Direction
from transfer.copy_job import Copy, run_copy
from transfer.copy_pool import CopyPool
from transfer.descriptor import INCARNATION_NBYTES
from transfer.errors import PathFailed, PeerLost, RegionError
from transfer.handshake import Identity
from transfer.lifeline import NBYTES as LIFELINE_NBYTES
from transfer.lifeline import Process
from transfer.local_path import MAX_CHUNK_ROWS, is_small
from transfer.memory_copy import SLICE_NBYTES, copy_from
from transfer.span import U64
from transfer.stream_path import StreamPath
from transfer.wire import RegionInfo


class ShmPath:
    """A ``Path`` by process_vm_readv.

    Reads need nothing of the peer but that it lives: it may be busy, or stopped. A write is a request that
    the peer copy from us, so that it is the peer who decides, at that moment, that the memory may be written.
    """

    name = "shm"
    networked = False

    def __init__(
        self,
        pool: CopyPool,
        peer: Identity,
        process: Process,
        region: Callable[[int], RegionInfo | None],
        writes: StreamPath,
    ) -> None:
        """process: the peer's, closed with the path. region: what is known of a region. writes: requests to
        the peer.
        """
        self._pool = pool
        self._peer = peer
        self._process = process
        self._region = region
        self._writes = writes

    def chunking(self, direction: Direction, nbytes: int) -> tuple[int, int]:
        return (
            (SLICE_NBYTES, MAX_CHUNK_ROWS)
            if direction == "read"
            else self._writes.chunking(direction, nbytes)
        )

    async def open(self, direction: Direction) -> None:
        if direction == "write":
            await self._writes.open(direction)

    def start(self, attempt: Attempt) -> None:
        if attempt.direction == "write":
            self._writes.start(attempt)
            return
        rows = attempt.plan.rows
        source = rows.offset.copy()
        region_ids = np.unique(rows.region).tolist()
        for region_id in region_ids:
            info = self._region(region_id)
            if info is None:
                attempt.stop(RegionError(region_id, "was closed by its owner"))
                return
            source[rows.region == region_id] += np.uint64(info.address)
        work = functools.partial(self._read, attempt, source, region_ids)
        if is_small(attempt):
            work()
        else:
            self._pool.submit(work)

    def _read(self, attempt: Attempt, source: U64, region_ids: list[int]) -> None:
        copy: Copy = functools.partial(copy_from, self._process.pid)
        conclude = functools.partial(self._conclude, region_ids)
        run_copy(
            attempt, attempt.plan.rows.address, source, copy, verify=attempt.verify_arrival, conclude=conclude
        )

    def _conclude(self, region_ids: list[int], failure: OSError | None) -> None:
        """Was that the peer's memory, and its region, to the end? Region ids are never used twice."""
        try:
            lifeline = self._process.read(self._peer.lifeline, LIFELINE_NBYTES)
        except OSError as error:
            raise PeerLost(self._peer.agent_id, f"its memory is gone ({error.strerror})") from error
        if not self._process.alive or lifeline[:INCARNATION_NBYTES] != self._peer.incarnation:
            raise PeerLost(self._peer.agent_id, "its process is gone")
        for region_id in region_ids:
            if not lifeline[INCARNATION_NBYTES + region_id]:
                raise RegionError(region_id, "was closed by its owner during the read")
        if failure is not None:
            lost = failure.errno == errno.ESRCH
            reason = "the process is gone" if lost else str(failure)
            raise PathFailed(self.name, reason) from failure

    async def close(self) -> None:
        await self._writes.close()
        self._process.close()
