"""How many requests are in flight, and when there is room again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Protocol

from conductor.errors import ConductorClosed, DuplicateRequest, RequestRejected

_WEIGHT = 1 / 16


class Run(Protocol):
    """A request in flight."""

    @property
    def request_id(self) -> str: ...

    @property
    def started_s(self) -> float: ...

    def abort(self, error: Exception) -> None: ...


class Admission:
    """Lets at most ``max_requests`` in, by request id."""

    def __init__(self, max_requests: int, clock: Callable[[], float]) -> None:
        self._max_requests = max_requests
        self._clock = clock
        self._runs: dict[str, Run] = {}
        self._mean_s = 1.0  # how long requests took
        self._closed = False
        self._empty: asyncio.Future[None] | None = None

    @property
    def runs(self) -> Mapping[str, Run]:
        return self._runs

    def enter(self, run: Run) -> None:
        """Raises ``RequestRejected``, ``DuplicateRequest`` or ``ConductorClosed``; it is not in then."""
        if self._closed:
            raise ConductorClosed
        if len(self._runs) >= self._max_requests:
            # With n in flight, one leaves every mean / n seconds.
            raise RequestRejected(
                f"{len(self._runs)} requests are in flight, the limit (conductor.max_requests)",
                retry_after_s=max(self._mean_s / len(self._runs), 0.1),
            )
        if run.request_id in self._runs:
            raise DuplicateRequest(run.request_id)
        self._runs[run.request_id] = run

    def leave(self, run: Run) -> None:
        """Idempotent."""
        if self._runs.get(run.request_id) is run:
            del self._runs[run.request_id]
            if not self._runs and self._empty is not None and not self._empty.done():
                self._empty.set_result(None)
            self._mean_s += _WEIGHT * (self._clock() - run.started_s - self._mean_s)

    async def emptied(self, timeout_s: float) -> None:
        """Return when nobody is in any more, or after ``timeout_s``."""
        if self._runs:
            self._empty = asyncio.get_running_loop().create_future()
            await asyncio.wait((self._empty,), timeout=timeout_s)

    def close(self) -> None:
        """Nobody gets in any more, and those inside are ended with ``ConductorClosed``."""
        self._closed = True
        for run in list(self._runs.values()):
            run.abort(ConductorClosed())
