"""A batch of spans under way: one awaitable, whatever threads and connections it takes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from moonpool.transfer import metrics
from moonpool.transfer.copying.attempt import Direction
from moonpool.transfer.errors import ChecksumMismatch, DeadlineExceeded, PeerLost, StaleEpoch, TransferError
from moonpool.transfer.memory.span import Spans
from moonpool.transfer.native.arrays import U64, Index
from moonpool.transfer.paths.base import Path
from moonpool.transfer.peers.failover import Attempts

if TYPE_CHECKING:
    from moonpool.transfer.copying.joint_read import JointRead
    from moonpool.transfer.peers.peer import Peer


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
        joint: JointRead | None,
    ) -> None:
        self.nbytes = local.total_nbytes
        self._peer = peer
        self._direction: Direction = direction
        self._num_spans = len(local)
        self._deadline_s = deadline_s
        self._notify = notify
        self._attempts = Attempts(
            peer,
            direction,
            local,
            addresses,
            remote,
            deadline_s=deadline_s,
            checksums=checksums,
            verify_on_network=verify_on_network,
            joint=joint,
        )
        loop = asyncio.get_running_loop()
        self._ends_at = loop.time() + deadline_s
        self._begun = False
        self._task = loop.create_task(self._run())
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
        if self._attempts.failure is None and not self._task.done():
            self._attempts.failure = error
            # A task that is cancelled before its first step never gets to say why.
            if self._begun:
                self._task.cancel()

    async def ended(self) -> None:
        """Wait until it has, however it did."""
        await asyncio.wait([self._task])

    def uses(self, region_id: int) -> bool:
        return region_id in self._attempts.remote_regions

    async def completions(self) -> AsyncIterator[int]:
        """The indices of spans as they become complete (and verified), in no particular order, each once.

        Ask before the first ``await`` after ``read`` or ``write``, or earlier ones are missed. Ends with the
        batch, and raises its error. Spans are the caller's only when the batch has ended, but those named
        here are already whole.
        """
        completed: asyncio.Queue[Index | None] = asyncio.Queue()
        self._attempts.on_spans = completed.put_nowait
        self._task.add_done_callback(lambda _: completed.put_nowait(None))
        seen = np.zeros(self._num_spans, bool)
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
            if self._attempts.failure is not None:
                raise self._attempts.failure
            async with asyncio.timeout_at(self._ends_at):
                path = await self._attempts.run()
        except TimeoutError:
            what = f"a {self._direction} of {self.nbytes} bytes"
            raise DeadlineExceeded(self._peer.agent_id, self._deadline_s, what) from None
        except asyncio.CancelledError:
            if self._attempts.failure is not None and self._task.cancelling() == 1:
                raise self._attempts.failure from None
            raise
        if self._notify is not None:
            self._peer.notify(self._notify)
        return path

    def _count(self, path: Path, seconds: float) -> None:
        counters = metrics.of_path(path.name, self._direction)
        counters.nbytes.inc(self.nbytes)
        counters.spans.inc(self._num_spans)
        counters.seconds.observe(seconds)
        counters.bandwidth.observe(self.nbytes, seconds)
