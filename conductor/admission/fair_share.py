"""Fair sharing among tenants: how long a request queues for being of a tenant ahead of its share.

Start-time fair queueing (Goyal, Vin and Cheng, 1996) in real time, over two resources (Ghodsi et al.,
"Multi-resource fair queueing", 2012). Nodes run waiting requests in the order of arrival plus this delay,
so no capacity is left idle for fairness.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

# A tenant competes while its last request is this recent, or while it is ahead of its share.
_ACTIVE_S = 10.0
# The longest delay: an idle hour of the others must not be repaid in one go.
_MOST_S = 600.0


class Work(NamedTuple):
    """Seconds of all prefill nodes, and of all decode nodes."""

    prefill_s: float = 0.0
    decode_s: float = 0.0

    def plus(self, other: Work) -> Work:
        return Work(self.prefill_s + other.prefill_s, self.decode_s + other.decode_s)

    def minus(self, other: Work) -> Work:
        return Work(self.prefill_s - other.prefill_s, self.decode_s - other.decode_s)


@dataclass(slots=True)
class _Account:
    weight: float
    seen_s: float
    done_s: Work  # when its work so far would be done with only its share


class FairShare:
    """Two virtual clocks per tenant. The one that is further ahead delays it: its dominant resource."""

    __slots__ = ("_accounts",)

    def __init__(self) -> None:
        self._accounts: dict[str, _Account] = {}

    def delay_s(self, tenant: str, now_s: float) -> float:
        """Seconds added to a request's arrival in the queues; 0 for a tenant within its share."""
        account = self._accounts.get(tenant)
        return 0.0 if account is None else max(*account.done_s, now_s) - now_s

    def least_delay_s(self, now_s: float) -> float:
        """The delay of the tenant that is least ahead, of those that compete; 0: none does."""
        self._competing(now_s)
        return min((max(*one.done_s, now_s) - now_s for one in self._accounts.values()), default=0.0)

    def num_competing(self, now_s: float) -> int:
        """The tenants that compete."""
        self._competing(now_s)
        return len(self._accounts)

    def charge(self, tenant: str, weight: float, work: Work, now_s: float) -> None:
        """The tenant used ``work``. Negative work is given back."""
        account = self._accounts.setdefault(tenant, _Account(weight, now_s, Work(now_s, now_s)))
        account.weight, account.seen_s = weight, now_s
        share = weight / self._competing(now_s)
        account.done_s = Work(
            *(
                min(max(done_s, now_s) + work_s / share, now_s + _MOST_S)
                for done_s, work_s in zip(account.done_s, work, strict=True)
            )
        )

    def _competing(self, now_s: float) -> float:
        """The sum of the weights of competing tenants; the others are forgotten."""
        for tenant, account in list(self._accounts.items()):
            if now_s - account.seen_s > _ACTIVE_S and max(account.done_s) <= now_s:
                del self._accounts[tenant]
        return sum(account.weight for account in self._accounts.values())
