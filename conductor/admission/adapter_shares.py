"""Fair sharing among the LoRA adapters of one tenant, as ``fair_share`` among tenants."""

from __future__ import annotations

from moonpool.conductor.admission.fair_share import FairShare, Work

# From this many on, those without recent requests are forgotten.
_MOST_TENANTS = 64


class AdapterShares:
    """Equal shares for each of a tenant's adapters and for the model alone (""). Of this conductor."""

    __slots__ = ("_by_tenant",)

    def __init__(self) -> None:
        self._by_tenant: dict[str, FairShare] = {}

    def delay_s(self, tenant: str, adapter: str, now_s: float) -> float:
        """Seconds that this adapter's requests come after those of the tenant's adapter that is least ahead.

        What all of them used does not count: that is for the shares of tenants.
        """
        shares = self._by_tenant.get(tenant)
        if shares is None:
            return 0.0
        own_s = shares.delay_s(adapter, now_s)
        return own_s - min(own_s, shares.least_delay_s(now_s))

    def charge(self, tenant: str, adapter: str, work: Work, now_s: float) -> None:
        """The adapter used ``work``. Negative work is given back."""
        shares = self._by_tenant.setdefault(tenant, FairShare())
        shares.charge(adapter, 1.0, work, now_s)
        if len(self._by_tenant) > _MOST_TENANTS:
            idle = [name for name, one in self._by_tenant.items() if not one.num_competing(now_s)]
            for name in idle:
                del self._by_tenant[name]
