"""Bytes between two agents of one process, or of an agent with itself."""

from __future__ import annotations

from collections.abc import Sequence

from moonpool.transfer.connections.wire import RegionInfo
from moonpool.transfer.copying.attempt import Attempt, Direction
from moonpool.transfer.copying.device import direct_copy
from moonpool.transfer.copying.job import CopyJob, copy_chunking
from moonpool.transfer.copying.memcpy import copy_here
from moonpool.transfer.copying.pool import CopyPool
from moonpool.transfer.errors import PathFailed, RegionError, SpanError
from moonpool.transfer.memory.chunks import Chunking
from moonpool.transfer.memory.region import Region, RegionTable
from moonpool.transfer.memory.span import Spans, region_ids


class LocalPath:
    """A ``Path`` within the process."""

    name = "local"
    networked = False

    def __init__(self, pool: CopyPool, regions: RegionTable) -> None:
        """``regions``: the peer's."""
        self._pool = pool
        self._regions = regions

    def chunking(self, direction: Direction, nbytes: int, observed: bool) -> Chunking:
        return copy_chunking(nbytes, observed)

    def carries(self, direction: Direction, ours: Sequence[Region], theirs: Sequence[RegionInfo]) -> bool:
        return True

    async def open(self, direction: Direction, region_ids: Sequence[int]) -> None:
        pass

    def start(self, attempt: Attempt) -> None:
        rows = attempt.plan.rows
        reads = attempt.direction == "read"
        spans = Spans(rows.region, rows.offset, rows.nbytes)
        try:
            hold = self._regions.hold(region_ids(spans), attempt.stop)
        except RegionError as error:
            attempt.stop(error)
            return
        attempt.afterwards(hold.release)
        try:
            there = self._regions.addresses(spans, writable=not reads)
        except SpanError as error:
            attempt.stop(SpanError(attempt.plan.span_at(error.index), error.reason))
            return
        on_device = next((h for h in (attempt.hold, hold) if h.device is not None), None)
        CopyJob(
            attempt,
            rows.address if reads else there,
            there if reads else rows.address,
            copy_here if on_device is None else direct_copy(on_device.staging),
            conclude=self._conclude,
            waits=on_device is not None,
        ).start(self._pool)

    def _conclude(self, failure: OSError | None) -> None:
        if failure is not None:
            raise PathFailed(self.name, str(failure)) from failure

    def progress(self, attempt: Attempt) -> dict[object, int]:
        return {}

    def drop(self, carriers: object) -> bool:
        return False

    async def close(self) -> None:
        pass
