"""A read of many spans under way on the progress thread."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from moonpool.transfer.copying.attempt import Attempt
from moonpool.transfer.copying.peer_memory import LIFELINE_ID
from moonpool.transfer.errors import PathFailed
from moonpool.transfer.memory.lifeline import lifeline_parts
from moonpool.transfer.native import ucx as lib
from moonpool.transfer.native.arrays import address_of
from moonpool.transfer.paths.ucx.endpoint import Endpoint

_CHUNKS_IN_FLIGHT = 4
_DRAIN_S = 0.03

_log = logging.getLogger(__name__)


class ReadOwner(Protocol):
    """What a read needs of its path."""

    @property
    def endpoint(self) -> Endpoint | None: ...

    def wake(self) -> None:
        """Make the progress thread look at its tasks. From any thread."""

    def conclude(self, region_ids: Sequence[int], lifeline: bytes) -> None:
        """Raises the TransferError that a read ends with although all bytes arrived."""


@dataclass(slots=True)
class _Posted:
    """A chunk on its way, or, after the last one, the lifeline. flush: a request, 0 when it is over."""

    chunk: int
    gets: list[int]
    flush: int = 0


class Read:
    """One attempt on the progress thread: a ``Task``."""

    def __init__(self, path: ReadOwner, attempt: Attempt, ids: list[int], bases: dict[int, int]) -> None:
        self._path = path
        self._attempt = attempt
        self._ids = ids
        self._bases = bases
        self._endpoint: Endpoint | None = None
        self._next = 0
        self._in_flight: deque[_Posted] = deque()
        parts = lifeline_parts(ids)
        self._lifeline = np.zeros(sum(nbytes for _, nbytes in parts), np.uint8)
        self._kicked = False

    def _kick(self) -> None:
        self._kicked = True
        self._path.wake()

    def step(self) -> bool:
        if self._endpoint is None and not self._begin():
            return True
        assert self._endpoint is not None
        try:
            if self._kicked or self._endpoint.failed or self._endpoint.closed:
                return self._broken(self._endpoint.failed)
            return self._post(self._endpoint) or self._collect(self._endpoint)
        except Exception as error:
            # Whatever it is, it is the batch's.
            return self._abandon(error)

    def _begin(self) -> bool:
        self._endpoint = self._path.endpoint
        if self._endpoint is None or not all(map(self._endpoint.knows, (LIFELINE_ID, *self._ids))):
            self._attempt.stop(PathFailed("ucx", "its connection broke", interrupted=True))
            return False
        return self._attempt.enter(self._kick)

    def _post(self, endpoint: Endpoint) -> bool:
        """Keep chunks on their way; behind the last one the lifeline. True when that broke the attempt."""
        chunks = len(self._attempt.plan.chunks)
        while self._next <= chunks and len(self._in_flight) < _CHUNKS_IN_FLIGHT:
            if self._next == chunks and self._in_flight:
                # The lifeline is looked at when all bytes are here, not before.
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
            of = rows if len(self._ids) == 1 else rows.take(np.flatnonzero(rows.region == region_id))
            there = of.offset + np.uint64(self._bases[region_id])
            status = endpoint.get(
                region_id, of.address.tolist(), of.nbytes.tolist(), there.tolist(), requests
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
                self._path.conclude(self._ids, self._lifeline.tobytes())
                self._attempt.leave(self._kick, chunks=chunk)
                return True
            spans = self._attempt.arrived(chunk)
            self._attempt.verify_arrival(spans)
            self._attempt.announce(spans)
        return False

    def _broken(self, status: int) -> bool:
        reason = f"its connection broke (status {status})"
        return self._abandon(PathFailed("ucx", reason, interrupted=status == 0))

    def _abandon(self, error: Exception) -> bool:
        """Leave, once nothing that was posted can touch the spans any more."""
        assert self._endpoint is not None
        requests = [
            request for posted in self._in_flight for request in (*posted.gets, posted.flush) if request
        ]
        self._in_flight.clear()
        # What is nearly there is let in; the connection, which others use, is broken off only if that takes
        # long.
        if not self._endpoint.wait(requests, 0 if self._endpoint.failed else _DRAIN_S):
            self._endpoint.close()
            if not self._endpoint.wait(requests, _DRAIN_S):
                _log.error("UCX does not give back %d requests of a broken connection", len(requests))
        self._attempt.leave(self._kick, error=error)
        return True
