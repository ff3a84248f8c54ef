"""The path between two agents of one process, or from an agent to itself."""

from __future__ import annotations

from collections.abc import Sequence

from moonpool.transfer.copying.attempt import Attempt
from moonpool.transfer.copying.batch_request import Direction
from moonpool.transfer.copying.device import direct_copy
from moonpool.transfer.copying.job import CopyJob
from moonpool.transfer.copying.memcpy import copy_here
from moonpool.transfer.copying.pool import CopyPool, copy_chunking
from moonpool.transfer.errors import GrantLapsed, PathFailed, RegionError, SpanError
from moonpool.transfer.memory.chunks import Chunking
from moonpool.transfer.memory.region import RegionTable
from moonpool.transfer.memory.span import region_ids
from moonpool.transfer.memory.write_grants import WriteGrants
from moonpool.transfer.paths.base import Path


class LocalPath(Path):
    """Copies between regions of the process."""

    name = "local"

    def __init__(self, pool: CopyPool, regions: RegionTable, grants: WriteGrants) -> None:
        """``regions``, ``grants``: the peer's."""
        self._pool = pool
        self._regions = regions
        self._grants = grants

    def chunking(
        self, direction: Direction, nbytes: int, verified: bool, region_ids: Sequence[int]
    ) -> Chunking:
        return copy_chunking(nbytes, verified)

    def start(self, attempt: Attempt) -> None:
        rows = attempt.plan.rows
        reads = attempt.request.direction == "read"
        spans = rows.remote_spans
        try:
            hold = self._regions.hold(region_ids(spans), attempt.stop)
        except RegionError as error:
            attempt.stop(error)
            return
        attempt.on_finished(hold.release)
        try:
            there = self._regions.addresses(spans, writable=not reads)
            if not reads:
                use = self._grants.use(attempt.request.grant, spans, attempt.stop)
                attempt.on_finished(use.release)
        except SpanError as error:
            attempt.stop(SpanError(attempt.plan.span_at(error.index), error.reason))
            return
        except GrantLapsed as error:
            attempt.stop(error)
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
