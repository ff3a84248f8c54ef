"""What each tenant uses through all conductors: each tells the others, and each counts all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from moonpool.conductor.admission.fair_share import FairShare, Work
from moonpool.conductor.admission.limits import Limits
from moonpool.conductor.admission.tenants import Tenant


@dataclass(frozen=True, slots=True)
class TenantUse:
    """Of one conductor. Tokens and work: since its start."""

    tenant: Tenant
    num_requests: int = 0  # in flight
    num_tokens: int = 0
    work: Work = Work()


class Usage:
    """Of this conductor and of the others. Limits and fair shares apply to both together.

    News of others is up to a report old (see ``coordination.peers``): requests that arrive at several
    conductors within that time may exceed a limit together.
    """

    def __init__(self, limits: Limits, fair_share: FairShare, clock: Callable[[], float]) -> None:
        self._limits = limits
        self._fair_share = fair_share
        self._clock = clock
        self._work: dict[str, Work] = {}
        self._others: dict[str, dict[str, TenantUse]] = {}  # by conductor, by tenant

    def charge(self, tenant: Tenant, work: Work) -> None:
        """The tenant used ``work`` through this conductor. Negative work is given back."""
        self._work[tenant.name] = self._work.get(tenant.name, Work()).plus(work)
        self._fair_share.charge(tenant.name, tenant.weight, work, self._clock())

    def own(self) -> list[TenantUse]:
        """Of this conductor, for the others."""
        limits = self._limits
        return [
            TenantUse(
                tenant,
                limits.num_of_tenant(tenant.name),
                limits.num_tokens[tenant.name],
                self._work.get(tenant.name, Work()),
            )
            for tenant in limits.tenants.values()
        ]

    def hear(self, conductor_id: str, uses: Iterable[TenantUse]) -> None:
        """Another conductor tells what its tenants use. What it told at first is not counted again."""
        is_new = conductor_id not in self._others
        before = self._others.get(conductor_id, {})
        self._others[conductor_id] = told = {use.tenant.name: use for use in uses}
        for name, use in told.items():
            was = use if is_new else before.get(name, TenantUse(use.tenant))
            if use.num_tokens != was.num_tokens:
                self._limits.use(use.tenant, use.num_tokens - was.num_tokens, self._clock())
            if use.work != was.work:
                work = use.work.minus(was.work)
                self._fair_share.charge(name, use.tenant.weight, work, self._clock())
        self._count()

    def forget(self, conductor_id: str) -> None:
        """A conductor has left. Idempotent."""
        if self._others.pop(conductor_id, None) is not None:
            self._count()

    def _count(self) -> None:
        elsewhere: Counter[str] = Counter()
        for told in self._others.values():
            for name, use in told.items():
                elsewhere[name] += use.num_requests
        self._limits.count_elsewhere(elsewhere)
