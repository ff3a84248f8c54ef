"""Attempts to move a batch, over one path to its peer after another, until one succeeds."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from moonpool.runtime.cancellation import outlast
from moonpool.transfer import metrics
from moonpool.transfer.connections.link import Link
from moonpool.transfer.connections.wire import RegionInfo
from moonpool.transfer.copying.attempt import Attempt
from moonpool.transfer.copying.batch_request import BatchRequest
from moonpool.transfer.errors import NoPath, PathFailed, PeerLost, RegionError, SpanError, TransferError
from moonpool.transfer.memory.chunks import ChunkPlan
from moonpool.transfer.memory.region import Region, RegionTable
from moonpool.transfer.memory.span import check_bounds, spans_in
from moonpool.transfer.paths.base import Path
from moonpool.transfer.peers.path_choice import MemoryKinds, PathChoice

# A batch starts again so often because another batch's end cut the connection they shared.
_MAX_INTERRUPTIONS = 16
_MAX_TRIES_A_PATH = 2
# Time without progress that counts as a stall: a fraction of the time left, within bounds. It must leave time
# for another path, and tolerate a few lost packets and a busy processor.
_STALL_FRACTION = 1 / 8
_MIN_STALL_S = 0.125
_MAX_STALL_S = 1.0


@dataclass(frozen=True, slots=True)
class PeerRoute:
    """The connections to a peer, and the local regions."""

    agent_id: str
    link: Link
    paths: PathChoice
    regions: RegionTable


class StallWatch:
    """Detects a stalled attempt, from its creation until ``cancel``: a cut link reports nothing.

    Carriers (connections) without progress between two checks are dropped, if the path has others. Otherwise
    the attempt is stopped with PathFailed, if another path is ``untried``. Otherwise it runs to the deadline.
    """

    def __init__(self, path: Path, attempt: Attempt, *, untried: bool) -> None:
        self._path = path
        self._attempt = attempt
        self._untried = untried
        self._seen: Mapping[object, int] = {}
        self._every_s = min(max(attempt.request.seconds_left() * _STALL_FRACTION, _MIN_STALL_S), _MAX_STALL_S)
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(self._every_s, self._look)

    def cancel(self) -> None:
        self._timer.cancel()

    def _look(self) -> None:
        seen, self._seen = self._seen, self._path.progress(self._attempt)
        stuck = [carrier for carrier, moved in self._seen.items() if seen.get(carrier) == moved]
        if self._loop.time() - self._timer.when() > self._every_s:
            # This process stood still: what has come meanwhile is not counted yet.
            stuck = []
        if stuck and not self._path.drop(stuck) and self._untried and len(stuck) == len(self._seen):
            reason = f"nothing has moved for {self._every_s:.3g} s"
            self._attempt.stop(PathFailed(self._path.name, reason))
            return
        self._timer = self._loop.call_later(self._every_s, self._look)


class Failover:
    """failure: the error with which the batch is being cancelled; None if its caller cancels it.

    Belongs to the event loop's thread.
    """

    def __init__(
        self, route: PeerRoute, request: BatchRequest, unfinished_streams: Sequence[int] = ()
    ) -> None:
        self.failure: TransferError | None = None
        self._route = route
        self._request = request
        self._unfinished_streams = list(unfinished_streams)
        self._loop = asyncio.get_running_loop()
        self._thread_id = threading.get_ident()

    async def run(self) -> Path:
        """Move the batch; return the path that did. After an error nothing touches the spans any more."""
        try:
            return await self._run()
        finally:
            if self._request.joint is not None:
                # The other reads must not wait for one that has ended.
                self._request.joint.dissolve()

    async def _run(self) -> Path:
        infos = await self._check_remote()
        paths = self._route.paths
        on_device = any(region.device is not None for region in self._local_regions())
        kinds = on_device, any(info.on_device for info in infos)
        tries: dict[str, int] = {}
        interruptions = 0
        reasons: list[str] = []
        failed: metrics.PathMetrics | None = None  # of the previous attempt
        while True:
            carriers = self._carriers(infos, kinds)
            path = next((path for path in carriers if tries.get(path.name, 0) < _MAX_TRIES_A_PATH), None)
            if not carriers and not tries:
                raise NoPath(self._route.agent_id, [path.name for path in paths])
            if path is None:
                raise PeerLost(self._route.agent_id, "; ".join(reasons[-4:]))
            untried = any(p is not path and not tries.get(p.name) for p in carriers)
            if failed is not None:
                failed.retries.inc()
            counters = metrics.of_path(path.name, self._request.direction)
            with counters.attempts.track_inprogress():
                error = await self._try(path, kinds, untried=untried)
            if error is None:
                return path
            counters.failed.inc()
            if not isinstance(error, PathFailed):
                raise error
            reasons.append(str(error))
            failed = counters
            if error.interrupted and interruptions < _MAX_INTERRUPTIONS:
                interruptions += 1
            else:
                tries[path.name] = tries.get(path.name, 0) + 1
                paths.failed(path)

    async def _try(self, path: Path, kinds: MemoryKinds, *, untried: bool) -> Exception | None:
        """untried: another path has not been tried yet."""
        try:
            await path.open(self._request.direction, self._request.remote_regions)
        except PathFailed as error:
            return error
        started = time.perf_counter()
        failure = await self._attempt(path, untried=untried)
        if failure is None:
            seconds = time.perf_counter() - started
            self._route.paths.succeeded(path, self._request.nbytes, seconds, kinds)
        return failure

    def _local_regions(self) -> list[Region]:
        # A region that was closed meanwhile ends the attempt.
        found = map(self._route.regions.find, self._request.local_regions)
        return [region for region in found if region is not None]

    def _carriers(self, infos: list[RegionInfo], kinds: MemoryKinds) -> list[Path]:
        """The paths that can move the batch, best first."""
        ours = self._local_regions()
        paths = self._route.paths.ranked(kinds)
        return [path for path in paths if path.carries(self._request.direction, ours, infos)]

    async def _check_remote(self) -> list[RegionInfo]:
        """Check the remote spans against what the peer says of its regions, and return that.

        The peer checks again itself, where a path involves it.
        """
        request, agent_id = self._request, self._route.agent_id
        infos = []
        for region_id in request.remote_regions:
            info = await self._route.link.region(region_id)
            where = spans_in(request.remote, region_id, request.remote_regions)
            if not info.open:
                at = int(where[0])
                raise RegionError(region_id, f"is not open at peer {agent_id} (span {at})")
            if request.direction == "write" and not info.writable:
                raise SpanError(int(where[0]), f"region {region_id} of {agent_id} is read-only")
            check_bounds(request.remote, region_id, info.nbytes, where)
            infos.append(info)
        return infos

    async def _attempt(self, path: Path, *, untried: bool) -> Exception | None:
        """Return the attempt's error. Until then the spans are in use, even after a cancellation."""
        request = self._request
        ended: asyncio.Future[Exception | None] = self._loop.create_future()
        verified = request.checksums is not None or request.joint is not None
        chunking = path.chunking(request.direction, request.nbytes, verified, request.remote_regions)
        verify_remote = request.verifies_remote(path.networked)
        plan = ChunkPlan(request.local, request.addresses, request.remote, chunking, merge=not verify_remote)
        attempt: Attempt | None = None

        def on_end(error: Exception | None) -> None:
            # From any thread.
            if threading.get_ident() == self._thread_id:
                _settle(ended, error)
            else:
                self._loop.call_soon_threadsafe(_settle, ended, error)

        def region_closed(error: RegionError) -> None:
            if attempt is not None:
                attempt.stop(error)

        # An open region has never been closed, so its address is unchanged.
        hold = self._route.regions.hold(request.local_regions, region_closed)
        attempt = Attempt(
            request,
            hold,
            plan,
            verify_remote=verify_remote,
            unfinished_streams=self._unfinished_streams,
            on_end=on_end,
        )
        try:
            path.start(attempt)
        except Exception as error:
            # A bug of ours. The attempt must release its hold, or its regions could never be closed.
            attempt.stop(error)
        watch, stop = StallWatch(path, attempt, untried=untried), attempt.stop
        try:
            # Threads use the spans until it has ended.
            return await outlast(ended, lambda: stop(self.failure or TransferError("it was cancelled")))
        finally:
            watch.cancel()


def _settle(ended: asyncio.Future[Exception | None], error: Exception | None) -> None:
    if not ended.done():
        ended.set_result(error)
