"""How far ahead of its share a tenant is, in seconds: what its next request waits for those of others.

Start-time fair queueing (Goyal, Vin and Cheng, 1996) told in real time. Nobody is held back here: nodes
compute waiting prefills in the order of arrival plus this lag, so that no capacity is left idle for fairness.
"""

from __future__ import annotations

# A tenant is taken to compete while its last request is this fresh, or still ahead of its share.
_ACTIVE_S = 10.0
# Beyond this nobody is told apart: an idle hour must not be repaid in one go.
_MOST_S = 600.0


class FairShare:
    """One clock a tenant: when the work it was given so far would be done, had it only its share."""

    __slots__ = ("_done_s", "_seen_s", "_weights")

    def __init__(self) -> None:
        self._done_s: dict[str, float] = {}
        self._seen_s: dict[str, float] = {}
        self._weights: dict[str, float] = {}

    def delay_s(self, tenant: str, now_s: float) -> float:
        """How much later than its arrival a request counts as come; 0 for a tenant within its share."""
        return max(self._done_s.get(tenant, now_s) - now_s, 0.0)

    def charge(self, tenant: str, weight: float, work_s: float, now_s: float) -> None:
        """A tenant was given ``work_s`` of the cluster: seconds if all its nodes worked for it alone."""
        self._weights[tenant] = weight
        self._seen_s[tenant] = now_s
        share = weight / self._competing(now_s)
        done_s = max(self._done_s.get(tenant, now_s), now_s) + work_s / share
        self._done_s[tenant] = min(done_s, now_s + _MOST_S)

    def _competing(self, now_s: float) -> float:
        """The weights of all who compete; tenants that are through are forgotten."""
        for tenant, seen_s in list(self._seen_s.items()):
            if now_s - seen_s > _ACTIVE_S and self._done_s.get(tenant, 0.0) <= now_s:
                del self._seen_s[tenant], self._weights[tenant]
                self._done_s.pop(tenant, None)
        return sum(self._weights.values())
