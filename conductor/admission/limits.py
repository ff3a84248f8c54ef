"""Admission control: limits on requests in flight, and on the tokens a minute of each tenant."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from moonpool.conductor.admission.tenants import Tenant
from moonpool.conductor.errors import ConductorClosed, DuplicateRequest, RequestRejected
from moonpool.conductor.request import GenerateRequest

_WEIGHT = 1 / 16
# The part of all requests in flight that batch requests may be: the rest is kept for interactive ones.
_BATCH_PART = 0.5


@dataclass(frozen=True, slots=True, eq=False)
class _Run:
    request: GenerateRequest
    abort: Callable[[Exception], None]
    started_s: float


class TokenBucket:
    """A minute's tokens, refilled evenly. It may go into debt: outputs end where they end."""

    __slots__ = ("_left", "_per_s", "_since_s", "_size")

    def __init__(self, tokens_per_minute: int, now_s: float) -> None:
        self._size = self._left = float(tokens_per_minute)
        self._per_s = tokens_per_minute / 60
        self._since_s = now_s

    def wait_s(self, now_s: float) -> float:
        """Seconds until there are tokens; 0: there are."""
        self._refill(now_s)
        return 0.0 if self._left > 0 else (1 - self._left) / self._per_s

    def resize(self, tokens_per_minute: int, now_s: float) -> None:
        """A larger bucket is filled from now on; of a smaller one the rest runs over."""
        self._refill(now_s)
        self._size, self._per_s = float(tokens_per_minute), tokens_per_minute / 60
        self._left = min(self._left, self._size)

    def use(self, num_tokens: int, now_s: float) -> None:
        self._refill(now_s)
        self._left -= num_tokens

    def _refill(self, now_s: float) -> None:
        self._left = min(self._size, self._left + (now_s - self._since_s) * self._per_s)
        self._since_s = now_s


class Admission:
    """At most ``max_requests`` requests in flight, by request id.

    ``tenants``: those that have sent requests; ``num_tokens``: that they used, prompts and outputs.
    """

    def __init__(self, max_requests: int, clock: Callable[[], float]) -> None:
        self._max_requests = max_requests
        self._max_batch = max(int(max_requests * _BATCH_PART), 1)
        self._clock = clock
        self._runs: dict[str, _Run] = {}
        self._waiting: dict[_Run, asyncio.Future[None]] = {}  # for room, in order of arrival
        self._num_batch = 0
        self._of_tenant: Counter[str] = Counter()
        self._elsewhere: Mapping[str, int] = {}
        self.tenants: dict[str, Tenant] = {}
        self.num_tokens: Counter[str] = Counter()
        self._buckets: dict[str, TokenBucket] = {}
        self._mean_s = 1.0  # duration of a request
        self._closed = False
        self._empty: asyncio.Future[None] | None = None

    @property
    def num_requests(self) -> int:
        """Requests in flight."""
        return len(self._runs)

    def num_of_tenant(self, name: str) -> int:
        """Requests of a tenant in flight."""
        return self._of_tenant[name]

    def count_elsewhere(self, num_requests: Mapping[str, int]) -> None:
        """Requests of tenants in flight at other conductors, for their limits."""
        self._elsewhere = num_requests
        self._let_in()

    def use(self, tenant: Tenant, num_tokens: int) -> None:
        """The tenant used tokens, here or at another conductor. Negative: they are given back."""
        if tenant.tokens_per_minute:
            self._bucket(tenant).use(num_tokens, self._clock())

    async def enter(
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
        full = self._full(request)
        if full and request.follows:
            return await self._wait(run, unless)
        if full:
            # With n in flight, one leaves every mean / n seconds.
            wait_s = max(self._mean_s / max(len(self._runs), 1), 0.1)
            raise RequestRejected(full, retry_after_s=wait_s, stage="limit")
        if not request.follows:
            self._check_tokens(request.client)
        self._admit(run)
        return True

    def leave(self, request: GenerateRequest, num_output_tokens: int, *, pays: bool = True) -> None:
        """The request has ended. ``pays`` False: it used no tokens of its tenant. Idempotent."""
        run = self._runs.get(request.request_id)
        if run is None or run.request is not request:
            return
        del self._runs[request.request_id]
        self._num_batch -= request.batch
        self._of_tenant[request.client.name] -= 1
        self._use_here(request.client, num_output_tokens if pays else -len(request.prompt_token_ids))
        if not self._runs and self._empty is not None and not self._empty.done():
            self._empty.set_result(None)
        self._mean_s += _WEIGHT * (self._clock() - run.started_s - self._mean_s)
        self._let_in()

    def _let_in(self) -> None:
        """Admit those that wait and have room."""
        for waiting, granted in list(self._waiting.items()):
            if waiting.request.request_id not in self._runs and not self._full(waiting.request):
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
            self.leave(run.request, 0, pays=False)  # both came together
            raise
        finally:
            self._waiting.pop(run, None)
        return granted.done()

    def _admit(self, run: _Run) -> None:
        request = run.request
        self._runs[request.request_id] = replace(run, started_s=self._clock())
        self._num_batch += request.batch
        self._of_tenant[request.client.name] += 1
        self._use_here(request.client, len(request.prompt_token_ids))

    def _full(self, request: GenerateRequest) -> str:
        """The limit that the request would exceed, as a sentence; empty: there is room."""
        client, num_batch = request.client, self._num_batch
        num_own = self._of_tenant[client.name] + self._elsewhere.get(client.name, 0)
        if len(self._runs) >= self._max_requests:
            return f"{len(self._runs)} requests are in flight, the limit (conductor.max_requests)"
        if request.batch and num_batch >= self._max_batch:
            return f"{num_batch} batch requests are in flight, the limit (half of conductor.max_requests)"
        if client.max_requests and num_own >= client.max_requests:
            return f"tenant {client.name} has {num_own} requests in flight, its limit"
        return ""

    def _check_tokens(self, client: Tenant) -> None:
        if not client.tokens_per_minute:
            return
        bucket, now_s = self._bucket(client), self._clock()
        bucket.resize(client.tokens_per_minute, now_s)  # its part in this cell changes
        if wait_s := bucket.wait_s(now_s):
            reason = f"tenant {client.name} has used its {client.tokens_per_minute} tokens a minute"
            raise RequestRejected(reason, retry_after_s=wait_s, stage="limit")

    def _use_here(self, client: Tenant, num_tokens: int) -> None:
        if client.name:
            self.tenants[client.name] = client
            self.num_tokens[client.name] += num_tokens
            self.use(client, num_tokens)

    def _bucket(self, client: Tenant) -> TokenBucket:
        bucket = self._buckets.get(client.name)
        if bucket is None:
            bucket = self._buckets[client.name] = TokenBucket(client.tokens_per_minute, self._clock())
        return bucket
