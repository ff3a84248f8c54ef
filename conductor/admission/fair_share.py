"""Fair sharing among tenants: how long a request queues for being of a tenant ahead of its share.

Start-time fair queueing (Goyal, Vin and Cheng, 1996) in real time. Nodes compute waiting prefills in the
order of arrival plus this delay, so no capacity is left idle for fairness.
"""

from __future__ import annotations

# A tenant competes while its last request is this recent, or while it is ahead of its share.
_ACTIVE_S = 10.0
# The longest delay: an idle hour of the others must not be repaid in one go.
_MOST_S = 600.0


class FairShare:
    """One virtual clock per tenant: when its work so far would be done with only its share."""

    __slots__ = ("_done_s", "_seen_s", "_weights")

    def __init__(self) -> None:
        self._done_s: dict[str, float] = {}
        self._seen_s: dict[str, float] = {}
        self._weights: dict[str, float] = {}

    def delay_s(self, tenant: str, now_s: float) -> float:
        """Seconds added to a request's arrival in the queues; 0 for a tenant within its share."""
        return max(self._done_s.get(tenant, now_s) - now_s, 0.0)

    def charge(self, tenant: str, weight: float, work_s: float, now_s: float) -> None:
        """The tenant used ``work_s`` seconds of the whole cluster."""
        self._weights[tenant] = weight
        self._seen_s[tenant] = now_s
        share = weight / self._competing(now_s)
        done_s = max(self._done_s.get(tenant, now_s), now_s) + work_s / share
        self._done_s[tenant] = min(done_s, now_s + _MOST_S)

    def _competing(self, now_s: float) -> float:
        """The sum of the weights of competing tenants; the others are forgotten."""
        for tenant, seen_s in list(self._seen_s.items()):
            if now_s - seen_s > _ACTIVE_S and self._done_s.get(tenant, 0.0) <= now_s:
                del self._seen_s[tenant], self._weights[tenant]
                self._done_s.pop(tenant, None)
        return sum(self._weights.values())
