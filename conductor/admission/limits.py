"""Who is let in: bounds on requests in flight, of all and of each tenant, and on a tenant's tokens."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Protocol

from moonpool.conductor.admission.tenants import Tenant
from moonpool.conductor.admission.token_bucket import TokenBucket
from moonpool.conductor.errors import ConductorClosed, DuplicateRequest, RequestRejected
from moonpool.conductor.request import GenerateRequest

_WEIGHT = 1 / 16
# Of all requests in flight, batch ones may be this part: the rest of the room is kept for interactive ones.
_BATCH_PART = 0.5


class Run(Protocol):
    """A request in flight."""

    @property
    def request(self) -> GenerateRequest: ...

    @property
    def request_id(self) -> str: ...

    @property
    def started_s(self) -> float: ...

    @property
    def num_output_tokens(self) -> int: ...

    def abort(self, error: Exception) -> None: ...


class Admission:
    """Lets at most ``max_requests`` in, by request id."""

    def __init__(self, max_requests: int, clock: Callable[[], float]) -> None:
        self._max_requests = max_requests
        self._max_batch = max(int(max_requests * _BATCH_PART), 1)
        self._clock = clock
        self._runs: dict[str, Run] = {}
        self._num_batch = 0
        self._of_tenant: Counter[str] = Counter()
        self._rates: dict[str, TokenBucket] = {}
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
        request = run.request
        self._check_total(request.batch)
        self._check_tenant(request.client)
        if run.request_id in self._runs:
            raise DuplicateRequest(run.request_id)
        self._runs[run.request_id] = run
        self._num_batch += request.batch
        self._of_tenant[request.client.name] += 1
        self._use(request.client, len(request.prompt_token_ids))

    def leave(self, run: Run) -> None:
        """Idempotent."""
        if self._runs.get(run.request_id) is not run:
            return
        del self._runs[run.request_id]
        self._num_batch -= run.request.batch
        client = run.request.client
        self._of_tenant[client.name] -= 1
        self._use(client, run.num_output_tokens)
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

    # ------------------------------------------------------------------ the bounds

    def _check_total(self, batch: bool) -> None:
        if len(self._runs) >= self._max_requests:
            raise self._full(f"{len(self._runs)} requests are in flight, the limit (conductor.max_requests)")
        if batch and self._num_batch >= self._max_batch:
            raise self._full(
                f"{self._num_batch} batch requests are in flight, the limit (half of conductor.max_requests)"
            )

    def _check_tenant(self, client: Tenant) -> None:
        num_requests = self._of_tenant[client.name]
        if client.max_requests and num_requests >= client.max_requests:
            raise self._full(f"tenant {client.name} has {num_requests} requests in flight, its limit")
        if client.tokens_per_minute:
            wait_s = self._rate(client).wait_s(self._clock())
            if wait_s:
                raise RequestRejected(
                    f"tenant {client.name} has used its {client.tokens_per_minute} tokens a minute",
                    retry_after_s=wait_s,
                    stage="limit",
                )

    def _full(self, reason: str) -> RequestRejected:
        # With n in flight, one leaves every mean / n seconds.
        wait_s = max(self._mean_s / max(len(self._runs), 1), 0.1)
        return RequestRejected(reason, retry_after_s=wait_s, stage="limit")

    def _use(self, client: Tenant, num_tokens: int) -> None:
        if client.tokens_per_minute:
            self._rate(client).use(num_tokens, self._clock())

    def _rate(self, client: Tenant) -> TokenBucket:
        rate = self._rates.get(client.name)
        if rate is None:
            rate = self._rates[client.name] = TokenBucket(client.tokens_per_minute, self._clock())
        return rate
