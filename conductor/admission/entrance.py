"""Admission control: requests enter within ``limits``, wait for room, or are rejected."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from moonpool.conductor.admission.limits import Limits
from moonpool.conductor.errors import ConductorClosed, DuplicateRequest, RequestRejected
from moonpool.conductor.request import GenerateRequest


@dataclass(frozen=True, slots=True, eq=False)
class _Run:
    request: GenerateRequest
    abort: Callable[[Exception], None]
    started_s: float


class Admission(Limits):
    """The requests in flight, by request id."""

    def __init__(self, max_requests: int, clock: Callable[[], float]) -> None:
        super().__init__(max_requests)
        self._clock = clock
        self._runs: dict[str, _Run] = {}
        self._waiting: dict[_Run, asyncio.Future[None]] = {}  # for room, in order of arrival
        self._closed = False
        self._empty: asyncio.Future[None] | None = None

    def count_elsewhere(self, num_requests: Mapping[str, int]) -> None:
        super().count_elsewhere(num_requests)
        self._let_in()

    async def admit(
        self, request: GenerateRequest, abort: Callable[[Exception], None], unless: asyncio.Future[None]
    ) -> bool:
        """Admit a request; ``close`` calls its ``abort``. False: ``unless`` was done before it was admitted.

        A request that ``follows`` another one waits for room. Its tokens go into its tenant's debt.
        Raises ``RequestRejected``, ``DuplicateRequest`` or ``ConductorClosed``.
        """
        if self._closed:
            raise ConductorClosed
        run = _Run(request, abort, self._clock())
        if request.request_id in self._runs:
            raise DuplicateRequest(request.request_id)
        if request.follows:
            if self.full(request.client, batch=request.batch):
                return await self._wait(run, unless)
        elif rejection := self.rejection(request.client, self._clock(), batch=request.batch):
            raise RequestRejected(rejection.reason, rejection.retry_after_s, rejection.stage)
        self._admit(run)
        return True

    def end(self, request: GenerateRequest, num_output_tokens: int, *, pays: bool = True) -> None:
        """The request has ended. ``pays`` False: it used no tokens of its tenant. Idempotent."""
        run = self._runs.get(request.request_id)
        if run is None or run.request is not request:
            return
        del self._runs[request.request_id]
        now_s = self._clock()
        num_tokens = num_output_tokens if pays else -len(request.prompt_token_ids)
        self.leave(request.client, num_tokens, now_s, lasted_s=now_s - run.started_s, batch=request.batch)
        if not self._runs and self._empty is not None and not self._empty.done():
            self._empty.set_result(None)
        self._let_in()

    def _let_in(self) -> None:
        """Admit those that wait and have room."""
        for waiting, granted in list(self._waiting.items()):
            request = waiting.request
            if request.request_id not in self._runs and not self.full(request.client, batch=request.batch):
                del self._waiting[waiting]
                self._admit(waiting)
                granted.set_result(None)

    async def emptied(self, timeout_s: float) -> None:
        """Return when no request is in flight, or after ``timeout_s``."""
        if self._runs:
            self._empty = asyncio.get_running_loop().create_future()
            await asyncio.wait((self._empty,), timeout=timeout_s)

    def close(self) -> None:
        """Admit no more requests, and end those in flight with ``ConductorClosed``."""
        self._closed = True
        for run in [*self._waiting, *self._runs.values()]:
            run.abort(ConductorClosed())

    async def _wait(self, run: _Run, unless: asyncio.Future[None]) -> bool:
        granted = self._waiting[run] = asyncio.get_running_loop().create_future()
        try:
            await asyncio.wait((granted, unless), return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            self.end(run.request, 0, pays=False)  # both came together
            raise
        finally:
            self._waiting.pop(run, None)
        return granted.done()

    def _admit(self, run: _Run) -> None:
        request, now_s = run.request, self._clock()
        self._runs[request.request_id] = replace(run, started_s=now_s)
        self.enter(request.client, len(request.prompt_token_ids), now_s, batch=request.batch)
