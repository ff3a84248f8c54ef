"""A batch of spans under way: one awaitable, whatever threads and connections it takes."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from transfer import metrics
from transfer.attempt import Attempt, Direction
from transfer.errors import (
    ChecksumMismatch,
    DeadlineExceeded,
    NoPath,
    PathFailed,
    PeerLost,
    RegionError,
    SpanError,
    StaleEpoch,
    TransferError,
)
from transfer.path import Path
from transfer.path_choice import Where
from transfer.plan import Plan
from transfer.span import U64, Index, Spans, check_bounds, region_ids, spans_in
from transfer.stall import StallWatch
from transfer.wire import RegionInfo

if TYPE_CHECKING:
    from transfer.peer import Peer

# How often a batch is started again because a neighbour's end cut its connection.
_MAX_INTERRUPTIONS = 16
_MAX_TRIES_A_PATH = 2


@dataclass(frozen=True, slots=True)
class TransferReport:
    """nbytes moved in ``seconds`` over the path ``transport``."""

    nbytes: int
    seconds: float
    transport: str


class Batch:
    """``await`` it for its ``TransferReport``, or its error; it runs whether awaited or not.

    Cancelling an ``await`` cancels the batch, and returns only when nothing touches the local spans any more.
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
        notify: bytes | None,
    ) -> None:
        self.nbytes = local.total_nbytes
        self._peer = peer
        self._direction: Direction = direction
        self._local = local
        self._local_regions = region_ids(local)
        self._addresses = addresses
        self._remote = remote
        self._remote_regions = region_ids(remote)
        self._deadline_s = deadline_s
        self._checksums = checksums
        self._verify_on_network = verify_on_network
        self._notify = notify
        self._left_behind: list[int] = []
        self._failure: TransferError | None = None
        self._loop = asyncio.get_running_loop()
        self._ends_at = self._loop.time() + deadline_s
        # The loop's clock stands still while it sleeps (uvloop), so the threads look at this one.
        self._ends_at_monotonic = time.monotonic() + deadline_s
        self._completed: asyncio.Queue[Index | None] | None = None
        self._begun = False
        self._task = self._loop.create_task(self._run())
        self._task.add_done_callback(lambda _: peer.batch_ended(self))

    def __await__(self) -> Generator[Any, None, TransferReport]:
        return self._task.__await__()

    def done(self) -> bool:
        return self._task.done()

    def cancel(self) -> None:
        """Stop it; ``await`` then raises CancelledError, once the spans are free."""
        self._task.cancel()

    def fail(self, error: TransferError) -> None:
        """End it with ``error``. For the peer's use."""
        if self._failure is None and not self._task.done():
            self._failure = error
            # A task that is cancelled before its first step never gets to say why.
            if self._begun:
                self._task.cancel()

    async def ended(self) -> None:
        """Wait until it has, however it did."""
        await asyncio.wait([self._task])

    def uses(self, region_id: int) -> bool:
        return region_id in self._remote_regions

    async def completions(self) -> AsyncIterator[int]:
        """The indices of spans as they become complete (and verified), in no particular order, each once.

        Ask before the first ``await`` after ``read`` or ``write``, or earlier ones are missed. Ends with the
        batch, and raises its error. Spans are the caller's only when the batch has ended, but those named
        here are already whole.
        """
        completed = self._completed = asyncio.Queue()
        self._task.add_done_callback(lambda _: completed.put_nowait(None))
        seen = np.zeros(len(self._local), bool)
        while (spans := await completed.get()) is not None:
            # A second attempt completes some of them again.
            fresh = spans[~seen[spans]]
            seen[fresh] = True
            for index in fresh.tolist():
                yield index
        await self._task

    async def _run(self) -> TransferReport:
        self._begun = True
        in_flight = metrics.in_flight(self._direction)
        in_flight.inc(self.nbytes)
        started = time.perf_counter()
        try:
            path = await self._within_deadline()
            seconds = time.perf_counter() - started
            self._count(path, seconds)
            return TransferReport(self.nbytes, seconds, path.name)
        except BaseException as error:
            metrics.FAILURES.labels(self._direction, type(error).__name__).inc()
            if isinstance(error, ChecksumMismatch):
                metrics.CHECKSUM_MISMATCHES.labels(self._direction).inc()
            if isinstance(error, PeerLost | StaleEpoch):
                self._peer.lose(error)
            raise
        finally:
            in_flight.dec(self.nbytes)

    async def _within_deadline(self) -> Path:
        try:
            if self._failure is not None:
                raise self._failure
            async with asyncio.timeout_at(self._ends_at):
                path = await self._move()
        except TimeoutError:
            what = f"a {self._direction} of {self.nbytes} bytes"
            raise DeadlineExceeded(self._peer.agent_id, self._deadline_s, what) from None
        except asyncio.CancelledError:
            if self._failure is not None and self._task.cancelling() == 1:
                raise self._failure from None
            raise
        if self._notify is not None:
            self._peer.notify(self._notify)
        return path

    async def _move(self) -> Path:
        infos = await self._check_remote()
        ours = map(self._peer.regions.find, self._local_regions)
        where = any(r is not None and r.device is not None for r in ours), any(i.on_device for i in infos)
        tries: dict[str, int] = {}
        interruptions = 0
        reasons: list[str] = []
        while True:
            carriers = self._carriers(infos, where)
            path = next((path for path in carriers if tries.get(path.name, 0) < _MAX_TRIES_A_PATH), None)
            if not carriers and not tries:
                raise NoPath(self._peer.agent_id, [path.name for path in self._peer.paths])
            if path is None:
                raise PeerLost(self._peer.agent_id, "; ".join(reasons[-4:]))
            elsewhere = any(p is not path and not tries.get(p.name) for p in carriers)
            error = await self._try(path, where, elsewhere=elsewhere)
            if error is None:
                return path
            if not isinstance(error, PathFailed):
                raise error
            reasons.append(str(error))
            metrics.RETRIES.labels(path.name, self._direction).inc()
            if error.interrupted and interruptions < _MAX_INTERRUPTIONS:
                interruptions += 1
            else:
                tries[path.name] = tries.get(path.name, 0) + 1
                self._peer.paths.failed(path)

    async def _try(self, path: Path, where: Where, *, elsewhere: bool) -> Exception | None:
        """elsewhere: there is a path that was not tried yet."""
        try:
            await path.open(self._direction, self._remote_regions)
        except PathFailed as error:
            return error
        started = time.perf_counter()
        ended_with = await self._attempt(path, elsewhere=elsewhere)
        if ended_with is None:
            self._peer.paths.succeeded(path, self.nbytes, time.perf_counter() - started, where)
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
        for region_id in self._remote_regions:
            info = await self._peer.link.region(region_id)
            where = spans_in(self._remote, region_id, self._remote_regions)
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
        observed = self._completed is not None or self._checksums is not None
        chunking = path.chunking(self._direction, self.nbytes, observed)
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
            on_spans=self._on_spans if self._completed is not None else None,
            on_end=lambda error: self._call(_settle, ended, error),
        )
        path.start(attempt)
        watch = StallWatch(path, attempt, elsewhere=elsewhere)
        try:
            return await asyncio.shield(ended)
        except asyncio.CancelledError:
            attempt.stop(self._failure or TransferError("the batch was cancelled"))
            while not ended.done():
                try:
                    await asyncio.shield(ended)
                except asyncio.CancelledError:
                    # However often we are told to go: first the threads must be out of the spans.
                    continue
            raise
        finally:
            watch.cancel()

    def _on_spans(self, spans: Index) -> None:
        if self._completed is not None:
            self._call(self._completed.put_nowait, spans)

    def _call(self, function: Callable[..., None], *arguments: object) -> None:
        """On the event loop's thread, from whichever this is."""
        if threading.get_ident() == self._peer.thread_id:
            function(*arguments)
        else:
            self._loop.call_soon_threadsafe(function, *arguments)

    def _count(self, path: Path, seconds: float) -> None:
        counters = metrics.of_path(path.name, self._direction)
        counters.nbytes.inc(self.nbytes)
        counters.spans.inc(len(self._local))
        counters.seconds.observe(seconds)
        counters.bandwidth.observe(self.nbytes, seconds)


def _settle(ended: asyncio.Future[Exception | None], error: Exception | None) -> None:
    if not ended.done():
        ended.set_result(error)
