"""Bytes between two agents of one process, or of an agent with itself."""

from __future__ import annotations

import functools
import os

from transfer.attempt import Attempt, Direction
from transfer.checksum import checksum
from transfer.copy_job import Copy, run_copy
from transfer.copy_pool import CopyPool
from transfer.errors import ChecksumMismatch, PathFailed, RegionError, SpanError
from transfer.memory_copy import SLICE_NBYTES, copy_from, copy_mapped
from transfer.plan import Index
from transfer.region import Hold, RegionTable
from transfer.span import U64, Spans

INLINE_NBYTES = 256 << 10
"""Below this the hop to a thread costs more than the copy: the event loop's thread does it, in some 50 µs at
most.
"""
INLINE_ROWS = 256
MAX_CHUNK_ROWS = 1024
# From this size on memmove is faster than the system call; below, the loop over rows in Python is slower.
_MEMMOVE_NBYTES = 128 << 10


class LocalPath:
    """A ``Path`` within the process."""

    name = "local"
    networked = False

    def __init__(self, pool: CopyPool, regions: RegionTable) -> None:
        """``regions``: the peer's."""
        self._pool = pool
        self._regions = regions

    def chunking(self, direction: Direction, nbytes: int) -> tuple[int, int]:
        return SLICE_NBYTES, MAX_CHUNK_ROWS

    async def open(self, direction: Direction) -> None:
        pass

    def start(self, attempt: Attempt) -> None:
        rows = attempt.plan.rows
        there = Spans(rows.region, rows.offset, rows.nbytes)
        try:
            hold = self._regions.hold(set(rows.region.tolist()), attempt.stop)
        except RegionError as error:
            attempt.stop(error)
            return
        try:
            addresses = self._regions.addresses(there, writable=attempt.direction == "write")
        except SpanError as error:
            hold.release()
            attempt.stop(SpanError(attempt.plan.span_at(error.index), error.reason))
            return
        work = functools.partial(self._run, attempt, addresses, hold)
        if is_small(attempt):
            work()
        else:
            self._pool.submit(work)

    def _run(self, attempt: Attempt, there: U64, hold: Hold) -> None:
        rows = attempt.plan.rows
        big = attempt.plan.nbytes >= _MEMMOVE_NBYTES * len(rows)
        copy: Copy = copy_mapped if big else functools.partial(copy_from, os.getpid())
        reads = attempt.direction == "read"
        to, source = (rows.address, there) if reads else (there, rows.address)

        def conclude(failure: OSError | None) -> None:
            hold.release()
            if failure is not None:
                raise PathFailed(self.name, str(failure)) from failure

        verify = attempt.verify_arrival if reads else functools.partial(_verify_there, attempt, hold)
        run_copy(attempt, to, source, copy, verify=verify, conclude=conclude)
        hold.release()

    async def close(self) -> None:
        pass


def is_small(attempt: Attempt) -> bool:
    """Worth doing on the event loop's thread at once."""
    return attempt.plan.nbytes <= INLINE_NBYTES and len(attempt.plan.rows) <= INLINE_ROWS


def _verify_there(attempt: Attempt, hold: Hold, spans: Index) -> None:
    if attempt.checksums is None:
        return
    buffers = {region.id: region.buffer for region in hold.regions}
    for index in spans.tolist():
        offset, nbytes = int(attempt.remote.offset[index]), int(attempt.remote.nbytes[index])
        found = checksum(buffers[int(attempt.remote.region[index])][offset : offset + nbytes])
        if found != attempt.checksums[index]:
            raise ChecksumMismatch(index, attempt.checksums[index], found)
