"""Limits on requests in flight, and on the tokens a minute of each tenant. Pure: see ``entrance``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from moonpool.conductor.admission.tenants import Tenant
from moonpool.conductor.placing.placement import Rejection

_LIMIT = "limit"
_WEIGHT = 1 / 16
# The part of all requests in flight that batch requests may be: the rest is kept for interactive ones.
_BATCH_PART = 0.5


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


class Limits:
    """At most ``max_requests`` requests in flight, and of each tenant what it may have.

    ``tenants``: those that have sent requests; ``num_tokens``: that they used, prompts and outputs. The
    simulator uses it, too.
    """

    def __init__(self, max_requests: int) -> None:
        self._max_requests = max_requests
        self._max_batch = max(int(max_requests * _BATCH_PART), 1)
        self.num_requests = 0  # in flight
        self._num_batch = 0
        self._of_tenant: Counter[str] = Counter()
        self._elsewhere: Mapping[str, int] = {}
        self.tenants: dict[str, Tenant] = {}
        self.num_tokens: Counter[str] = Counter()
        self._buckets: dict[str, TokenBucket] = {}
        self._mean_s = 1.0  # duration of a request

    def num_of_tenant(self, name: str) -> int:
        """Requests of a tenant in flight."""
        return self._of_tenant[name]

    def count_elsewhere(self, num_requests: Mapping[str, int]) -> None:
        """Requests of tenants in flight at other conductors, for their limits."""
        self._elsewhere = num_requests

    def use(self, tenant: Tenant, num_tokens: int, now_s: float) -> None:
        """The tenant used tokens, here or at another conductor. Negative: they are given back."""
        if tenant.tokens_per_minute:
            self._bucket(tenant, now_s).use(num_tokens, now_s)

    def full(self, client: Tenant, *, batch: bool = False) -> str:
        """The limit that a request of ``client`` would exceed, as a sentence; empty: there is room."""
        num_own = self._of_tenant[client.name] + self._elsewhere.get(client.name, 0)
        if self.num_requests >= self._max_requests:
            return f"{self.num_requests} requests are in flight, the limit (conductor.max_requests)"
        if batch and self._num_batch >= self._max_batch:
            return (
                f"{self._num_batch} batch requests are in flight, the limit (half of conductor.max_requests)"
            )
        if client.max_requests and num_own >= client.max_requests:
            return f"tenant {client.name} has {num_own} requests in flight, its limit"
        return ""

    def rejection(self, client: Tenant, now_s: float, *, batch: bool = False) -> Rejection | None:
        """Why a new request of ``client`` may not enter now; None: it may, and must ``enter`` next."""
        if full := self.full(client, batch=batch):
            # With n in flight, one leaves every mean / n seconds.
            wait_s = max(self._mean_s / max(self.num_requests, 1), 0.1)
            return Rejection(full, retry_after_s=wait_s, stage=_LIMIT)
        if not client.tokens_per_minute:
            return None
        bucket = self._bucket(client, now_s)
        bucket.resize(client.tokens_per_minute, now_s)  # its part in this cell changes
        if not (wait_s := bucket.wait_s(now_s)):
            return None
        reason = f"tenant {client.name} has used its {client.tokens_per_minute} tokens a minute"
        return Rejection(reason, retry_after_s=wait_s, stage=_LIMIT)

    def enter(self, client: Tenant, num_prompt_tokens: int, now_s: float, *, batch: bool = False) -> None:
        self.num_requests += 1
        self._num_batch += batch
        self._of_tenant[client.name] += 1
        self._use_here(client, num_prompt_tokens, now_s)

    def leave(
        self, client: Tenant, num_tokens: int, now_s: float, *, lasted_s: float, batch: bool = False
    ) -> None:
        """A request that had entered has ended. ``num_tokens``: of its output; negative: given back."""
        self.num_requests -= 1
        self._num_batch -= batch
        self._of_tenant[client.name] -= 1
        self._use_here(client, num_tokens, now_s)
        self._mean_s += _WEIGHT * (lasted_s - self._mean_s)

    def _use_here(self, client: Tenant, num_tokens: int, now_s: float) -> None:
        if client.name:
            self.tenants[client.name] = client
            self.num_tokens[client.name] += num_tokens
            self.use(client, num_tokens, now_s)

    def _bucket(self, client: Tenant, now_s: float) -> TokenBucket:
        bucket = self._buckets.get(client.name)
        if bucket is None:
            bucket = self._buckets[client.name] = TokenBucket(client.tokens_per_minute, now_s)
        return bucket
