"""A read of many spans on the progress thread."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from moonpool.transfer.connections.handshake import Identity
from moonpool.transfer.copying.attempt import Attempt
from moonpool.transfer.copying.peer_memory import LIFELINE_ID, check_lifeline
from moonpool.transfer.errors import PathFailed
from moonpool.transfer.memory.lifeline import lifeline_parts
from moonpool.transfer.native import ucx as lib
from moonpool.transfer.native.arrays import address_of
from moonpool.transfer.paths.ucx.endpoint import Endpoint
from moonpool.transfer.paths.ucx.worker import UcxWorker

_CHUNKS_IN_FLIGHT = 4
_DRAIN_S = 0.03
# UCX completes all requests of a closed connection within milliseconds. It has an error if it does not.
_GIVE_UP_S = 2.0


@dataclass(slots=True)
class _Posted:
    """A requested chunk; after the last chunk, the lifeline. flush: a request, 0 when it is over."""

    chunk: int
    gets: list[int]
    flush: int = 0


class Read:
    """One attempt on the progress thread: a ``Task``."""

    def __init__(
        self,
        worker: UcxWorker,
        peer: Identity,
        endpoint: Callable[[], Endpoint | None],
        attempt: Attempt,
        ids: list[int],
        bases: dict[int, int],
    ) -> None:
        """endpoint: returns the path's. bases: addresses of the regions ``ids`` and of the lifeline."""
        self._worker = worker
        self._peer = peer
        self._find_endpoint = endpoint
        self._attempt = attempt
        self._ids = ids
        self._bases = bases
        self._endpoint: Endpoint | None = None
        self._next = 0
        self._in_flight: deque[_Posted] = deque()
        parts = lifeline_parts(ids)
        self._lifeline = np.zeros(sum(nbytes for _, nbytes in parts), np.uint8)
        self._interrupted = False
        self._failure: Exception | None = None
        self._failed_s = 0.0
        self._unfinished: list[int] = []  # requests

    def _interrupt(self) -> None:
        self._interrupted = True
        self._worker.wake()

    def step(self) -> bool:
        if self._endpoint is None and not self._begin():
            return True
        assert self._endpoint is not None
        if self._failure is not None:
            return self._wind_down(self._failure)
        try:
            if self._interrupted or self._worker.stopped or self._endpoint.failed or self._endpoint.closed:
                return self._broken(self._endpoint.failed)
            return self._post(self._endpoint) or self._collect(self._endpoint)
        except Exception as error:
            # Any error ends the batch.
            return self._abandon(error)

    def _begin(self) -> bool:
        self._endpoint = self._find_endpoint()
        if self._endpoint is None or not all(map(self._endpoint.knows, (LIFELINE_ID, *self._ids))):
            self._attempt.stop(PathFailed("ucx", "its connection broke", interrupted=True))
            return False
        if not self._attempt.enter(self._interrupt):
            return False
        self._endpoint.num_reads += 1
        return True

    def _post(self, endpoint: Endpoint) -> bool:
        """Request chunks, and the lifeline after the last one. True: the attempt failed."""
        chunks = len(self._attempt.plan.chunks)
        while self._next <= chunks and len(self._in_flight) < _CHUNKS_IN_FLIGHT:
            if self._next == chunks and self._in_flight:
                # The lifeline must be read after all bytes have arrived.
                return False
            posted = _Posted(self._next, [])
            self._in_flight.append(posted)
            if self._next == chunks:
                status = self._post_lifeline(endpoint, posted.gets)
            else:
                status = self._post_chunk(endpoint, self._next, posted.gets)
            if status == lib.OK:
                status, posted.flush = endpoint.flush()
            if status < 0:
                return self._broken(status)
            self._next += 1
        return False

    def _post_chunk(self, endpoint: Endpoint, chunk: int, requests: list[int]) -> int:
        rows = self._attempt.rows(chunk)
        for region_id in self._ids:
            part = rows if len(self._ids) == 1 else rows[np.flatnonzero(rows.region == region_id)]
            there = part.offset + np.uint64(self._bases[region_id])
            status = endpoint.get(
                region_id, part.address.tolist(), part.nbytes.tolist(), there.tolist(), requests
            )
            if status != lib.OK:
                return status
        return lib.OK

    def _post_lifeline(self, endpoint: Endpoint, requests: list[int]) -> int:
        offsets, sizes = zip(*lifeline_parts(self._ids), strict=True)
        first, base = address_of(self._lifeline), self._bases[LIFELINE_ID]
        here = [first + sum(sizes[:at]) for at in range(len(sizes))]
        return endpoint.get(LIFELINE_ID, here, sizes, [base + offset for offset in offsets], requests)

    def _collect(self, endpoint: Endpoint) -> bool:
        while self._in_flight:
            posted = self._in_flight[0]
            if posted.flush:
                status = endpoint.check(posted.flush)
                if status == lib.IN_PROGRESS:
                    return False
                posted.flush = 0
                if status < 0:
                    return self._broken(status)
            self._in_flight.popleft()
            endpoint.free(posted.gets)
            chunk = posted.chunk
            if chunk == len(self._attempt.plan.chunks):
                check_lifeline(self._lifeline.tobytes(), self._peer, self._ids)
                self._leave(chunk, None)
                return True
            self._attempt.verify_arrival(self._attempt.arrived(chunk))
        return False

    def _broken(self, status: int) -> bool:
        reason = f"its connection broke (status {status})"
        return self._abandon(PathFailed("ucx", reason, interrupted=status == 0))

    def _abandon(self, error: Exception) -> bool:
        self._failure, self._failed_s = error, time.monotonic()
        self._unfinished = [
            request for posted in self._in_flight for request in (*posted.gets, posted.flush) if request
        ]
        self._in_flight.clear()
        return self._wind_down(error)

    def _wind_down(self, error: Exception) -> bool:
        """Leave when no request can touch the spans any more; until then they are not the caller's."""
        assert self._endpoint is not None
        if not self._worker.stopped and not self._endpoint.are_complete(self._unfinished):
            waited_s = time.monotonic() - self._failed_s
            # Other reads share the connection, so it is closed only if the requests take long to complete.
            if self._endpoint.failed or waited_s > _DRAIN_S:
                self._endpoint.close()
            if waited_s < _GIVE_UP_S:
                return False
            count = len(self._unfinished)
            self._worker.give_up(f"{count} requests of a closed connection are not complete")
        self._leave(0, error)
        return True

    def _leave(self, chunks: int, error: Exception | None) -> None:
        assert self._endpoint is not None
        self._endpoint.read_ended()
        self._attempt.leave(self._interrupt, chunks, error)
