"""A batch of spans in progress."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from moonpool.runtime.observing import failures
from moonpool.transfer import metrics
from moonpool.transfer.copying.batch_request import BatchRequest, Direction
from moonpool.transfer.errors import ChecksumMismatch, DeadlineExceeded, PeerLost, StaleEpoch, TransferError
from moonpool.transfer.paths.base import Path
from moonpool.transfer.peers.failover import Failover, PeerRoute

# After so much work without a wait, other tasks get their turn.
_TURN_S = 50e-6


@dataclass(frozen=True, slots=True)
class TransferReport:
    """nbytes moved in ``seconds`` over the path ``transport``."""

    nbytes: int
    seconds: float
    transport: str


def moved(direction: Direction, path: str, nbytes: int, num_spans: int, seconds: float) -> TransferReport:
    """Count a finished batch."""
    counters = metrics.of_path(path, direction)
    counters.nbytes.inc(nbytes)
    counters.spans.inc(num_spans)
    counters.seconds.observe(seconds)
    counters.bandwidth.observe(nbytes, seconds)
    return TransferReport(nbytes, seconds, path)


class BatchOwner(Protocol):
    """What a batch needs of its peer."""

    def notify(self, payload: bytes) -> None: ...

    def lose(self, error: TransferError) -> None: ...

    def batch_ended(self, batch: Batch) -> None: ...


class Batch:
    """Await it for its ``TransferReport`` or its error. It runs whether it is awaited or not.

    Cancelling an ``await`` cancels the batch, and returns only when nothing touches the local spans any more.
    """

    def __init__(
        self,
        owner: BatchOwner,
        route: PeerRoute,
        request: BatchRequest,
        unfinished_streams: Sequence[int] = (),
    ) -> None:
        """unfinished_streams: of a write that was begun: see ``Attempt``."""
        self.nbytes = request.nbytes
        self._owner = owner
        self._agent_id = route.agent_id
        self._request = request
        self._failover = Failover(route, request, unfinished_streams)
        self._begun = False
        self._task = asyncio.get_running_loop().create_task(self._run())
        self._task.add_done_callback(lambda _: owner.batch_ended(self))

    def __await__(self) -> Generator[Any, None, TransferReport]:
        return self._task.__await__()

    def done(self) -> bool:
        return self._task.done()

    def cancel(self) -> None:
        """Stop it. ``await`` then raises CancelledError, once nothing touches the spans any more."""
        self._task.cancel()

    def fail(self, error: TransferError) -> None:
        """End it with ``error``. Called by the peer."""
        if self._failover.failure is None and not self._task.done():
            self._failover.failure = error
            # A task that is cancelled before its first step could not raise the error.
            if self._begun:
                self._task.cancel()

    async def ended(self) -> None:
        """Wait for the end. Raises nothing."""
        await asyncio.wait([self._task])

    def uses(self, region_id: int) -> bool:
        return region_id in self._request.remote_regions

    async def _run(self) -> TransferReport:
        self._begun = True
        direction, nbytes = self._request.direction, self.nbytes
        in_flight = metrics.in_flight(direction)
        in_flight.inc(nbytes)
        started = time.perf_counter()
        try:
            path = await self._within_deadline()
        except BaseException as error:
            metrics.FAILURES.labels(direction, type(error).__name__).inc()
            failures.count_error(error)
            if isinstance(error, ChecksumMismatch):
                metrics.CHECKSUM_MISMATCHES.labels(direction).inc()
            if isinstance(error, PeerLost | StaleEpoch):
                self._owner.lose(error)
            raise
        finally:
            in_flight.dec(nbytes)
        seconds = time.perf_counter() - started
        return moved(direction, path.name, nbytes, len(self._request.local), seconds)

    async def _within_deadline(self) -> Path:
        request = self._request
        try:
            if self._failover.failure is not None:
                raise self._failover.failure
            async with asyncio.timeout(request.seconds_left()):
                path = await self._failover.run()
        except TimeoutError:
            what = f"a {request.direction} of {request.nbytes} bytes"
            raise DeadlineExceeded(self._agent_id, request.deadline_s, what) from None
        except asyncio.CancelledError:
            if self._failover.failure is not None and self._task.cancelling() == 1:
                raise self._failover.failure from None
            raise
        if request.notify is not None:
            self._owner.notify(request.notify)
        return path


@dataclass(slots=True)
class LoopTurn:
    """The time that work without a wait has taken on the event loop since the loop last ran other work."""

    spent_s: float = 0.0


class DoneBatch(Batch):
    """A batch that was done when it was posted.

    Awaiting it lets the loop run other work once in a while, so that a task of many such batches is no
    obstacle to other tasks.
    """

    def __init__(self, report: TransferReport, turn: LoopTurn) -> None:
        self.nbytes = report.nbytes
        self._report = report
        self._turn = turn

    def __await__(self) -> Generator[Any, None, TransferReport]:
        if self._turn.spent_s >= _TURN_S:
            self._turn.spent_s = 0.0
            yield
        return self._report

    def done(self) -> bool:
        return True

    def cancel(self) -> None: ...

    def fail(self, error: TransferError) -> None: ...

    async def ended(self) -> None: ...

    def uses(self, region_id: int) -> bool:
        return False
