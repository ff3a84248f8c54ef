"""The attempts to move a batch, over one path to its peer after the other, until one succeeds."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from moonpool.transfer import metrics
from moonpool.transfer.connections.wire import RegionInfo
from moonpool.transfer.copying.attempt import Attempt, Direction
from moonpool.transfer.errors import NoPath, PathFailed, PeerLost, RegionError, SpanError, TransferError
from moonpool.transfer.memory.chunks import Plan
from moonpool.transfer.memory.span import Spans, check_bounds, region_ids, spans_in
from moonpool.transfer.native.arrays import U64, Index
from moonpool.transfer.paths.base import Path
from moonpool.transfer.peers.path_choice import Where
from moonpool.transfer.peers.stall import StallWatch

if TYPE_CHECKING:
    from moonpool.transfer.copying.joint_read import JointRead
    from moonpool.transfer.peers.peer import Peer

# How often a batch is started again because a neighbour's end cut its connection.
_MAX_INTERRUPTIONS = 16
_MAX_TRIES_A_PATH = 2


class Attempts:
    """Belongs to the event loop's thread.

    on_spans: told, from the next attempt on, which spans have become whole. failure: why it is about to be
    cancelled, where not at the caller's wish.
    """

    def __init__(
        self,
        peer: Peer,
        direction: Direction,
        local: Spans,
        addresses: U64,
        remote: Spans,
        *,
        deadline_s: float,
        checksums: U64 | None,
        verify_on_network: bool,
        joint: JointRead | None,
    ) -> None:
        """The time runs from now. The rest as of ``Batch``."""
        self.remote_regions = region_ids(remote)
        self.on_spans: Callable[[Index], None] | None = None
        self.failure: TransferError | None = None
        self._peer = peer
        self._direction: Direction = direction
        self._local = local
        self._nbytes = local.total_nbytes
        self._local_regions = region_ids(local)
        self._addresses = addresses
        self._remote = remote
        self._checksums = checksums
        self._verify_on_network = verify_on_network
        self._joint = joint
        self._left_behind: list[int] = []
        self._loop = asyncio.get_running_loop()
        # The loop's clock stands still while it sleeps (uvloop), so the threads look at this one.
        self._ends_at_monotonic = time.monotonic() + deadline_s

    async def run(self) -> Path:
        """Returns the path that moved it. Raises what the batch comes to; nothing touches its spans then."""
        try:
            return await self._run()
        finally:
            if self._joint is not None:
                # Who has ended without the others, or before them, is not waited for.
                self._joint.dissolve()

    async def _run(self) -> Path:
        infos = await self._check_remote()
        ours = map(self._peer.regions.find, self._local_regions)
        where = any(r is not None and r.device is not None for r in ours), any(i.on_device for i in infos)
        tries: dict[str, int] = {}
        interruptions = 0
        reasons: list[str] = []
        failed: metrics.PathMetrics | None = None  # the attempt before
        while True:
            carriers = self._carriers(infos, where)
            path = next((path for path in carriers if tries.get(path.name, 0) < _MAX_TRIES_A_PATH), None)
            if not carriers and not tries:
                raise NoPath(self._peer.agent_id, [path.name for path in self._peer.paths])
            if path is None:
                raise PeerLost(self._peer.agent_id, "; ".join(reasons[-4:]))
            elsewhere = any(p is not path and not tries.get(p.name) for p in carriers)
            if failed is not None:
                failed.retries.inc()
            counters = metrics.of_path(path.name, self._direction)
            with counters.attempts.track_inprogress():
                error = await self._try(path, where, elsewhere=elsewhere)
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
                self._peer.paths.failed(path)

    async def _try(self, path: Path, where: Where, *, elsewhere: bool) -> Exception | None:
        """elsewhere: there is a path that was not tried yet."""
        try:
            await path.open(self._direction, self.remote_regions)
        except PathFailed as error:
            return error
        started = time.perf_counter()
        ended_with = await self._attempt(path, elsewhere=elsewhere)
        if ended_with is None:
            self._peer.paths.succeeded(path, self._nbytes, time.perf_counter() - started, where)
        return ended_with

    def _carriers(self, infos: list[RegionInfo], where: Where) -> list[Path]:
        """The paths for it, best first."""
        # One that is closed meanwhile ends the attempt.
        ours = [region for region_id in self._local_regions if (region := self._peer.regions.find(region_id))]
        paths = self._peer.paths.ranked(where)
        return [path for path in paths if path.carries(self._direction, ours, infos)]

    async def _check_remote(self) -> list[RegionInfo]:
        """The remote spans, as far as we know the peer's regions; the peer itself checks again where it
        can. Returns what is known.
        """
        infos = []
        for region_id in self.remote_regions:
            info = await self._peer.link.region(region_id)
            where = spans_in(self._remote, region_id, self.remote_regions)
            if not info.open:
                at = int(where[0])
                raise RegionError(region_id, f"is not open at peer {self._peer.agent_id} (span {at})")
            if self._direction == "write" and not info.writable:
                raise SpanError(int(where[0]), f"region {region_id} of {self._peer.agent_id} is read-only")
            check_bounds(self._remote, region_id, info.nbytes, where)
            infos.append(info)
        return infos

    async def _attempt(self, path: Path, *, elsewhere: bool) -> Exception | None:
        """Returns what it ended with. Until then nobody else may touch the spans, cancelled or not."""
        ended: asyncio.Future[Exception | None] = self._loop.create_future()
        observed = self.on_spans is not None or self._checksums is not None or self._joint is not None
        chunking = path.chunking(self._direction, self._nbytes, observed)
        verify = self._checksums is not None or (self._verify_on_network and path.networked)
        verify_remote = verify and self._direction == "write"
        plan = Plan(self._local, self._addresses, self._remote, chunking, merge=not verify_remote)
        attempt: Attempt | None = None

        def region_closed(error: RegionError) -> None:
            if attempt is not None:
                attempt.stop(error)

        # Regions that are open have never been closed, so their addresses are still what they were.
        hold = self._peer.regions.hold(self._local_regions, region_closed)
        attempt = Attempt(
            self._direction,
            self._local,
            self._remote,
            hold,
            plan,
            deadline_s=lambda: self._ends_at_monotonic - time.monotonic(),
            promised=self._checksums,
            verify_remote=verify_remote,
            left_behind=self._left_behind,
            on_spans=self._announce if self.on_spans is not None else None,
            on_end=lambda error: self._call(_settle, ended, error),
            joint=self._joint,
        )
        try:
            path.start(attempt)
        except Exception as error:
            # Our bug; but what the attempt holds must be let go, or no region of it could ever be closed.
            attempt.stop(error)
        watch = StallWatch(path, attempt, elsewhere=elsewhere)
        try:
            return await asyncio.shield(ended)
        except asyncio.CancelledError:
            attempt.stop(self.failure or TransferError("the batch was cancelled"))
            while not ended.done():
                try:
                    await asyncio.shield(ended)
                except asyncio.CancelledError:
                    # However often we are told to go: first the threads must be out of the spans.
                    continue
            raise
        finally:
            watch.cancel()

    def _announce(self, spans: Index) -> None:
        if self.on_spans is not None:
            self._call(self.on_spans, spans)

    def _call(self, function: Callable[..., None], *arguments: object) -> None:
        """On the event loop's thread, from whichever this is."""
        if threading.get_ident() == self._peer.thread_id:
            function(*arguments)
        else:
            self._loop.call_soon_threadsafe(function, *arguments)


def _settle(ended: asyncio.Future[Exception | None], error: Exception | None) -> None:
    if not ended.done():
        ended.set_result(error)
