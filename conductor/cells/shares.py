"""How the requests of each tenant are divided among cells, as one router sees it: so its limits are, too."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import Final

from moonpool.conductor.admission.tenants import Tenant
from moonpool.conductor.api.errors import bad_request

SHARE_HEADER: Final = "x-moonpool-tenant-share"
"""Of a request: the part of its tenant's limits that its cell may admit."""

_HALF_LIFE_S: Final = 10.0


def limited(client: Tenant, headers: Mapping[str, str]) -> Tenant:
    """The tenant with the limits that a router left to this cell. A client could only lower them.

    Raises ``ApiError`` 400.
    """
    given = headers.get(SHARE_HEADER, "1")
    try:
        share = float(given)
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise bad_request(f"{SHARE_HEADER}: must be above 0 and at most 1, got {given[:64]!r}", SHARE_HEADER)
    return client if share == 1 else client.limited_to(share)


class TenantShares:
    """Counts requests by tenant and cell; one counts half after ``_HALF_LIFE_S``."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._counts: dict[str, dict[str, tuple[float, float]]] = {}  # by tenant, cell: count, and when

    def count(self, client: Tenant, cell: str, usable: Collection[str]) -> float:
        """A request of a tenant with limits goes to a cell. Returns the cell's share of its requests to this
        cell and the ``usable`` ones, up to 1; 1 for tenants without limits."""
        if not (client.max_requests or client.tokens_per_minute):
            return 1.0
        now_s, cells = self._clock(), self._counts.setdefault(client.name, {})
        cells[cell] = (self._faded(*cells.get(cell, (0.0, now_s)), now_s) + 1.0, now_s)
        total = sum(self._faded(*cells[name], now_s) for name in {cell, *usable} & cells.keys())
        return cells[cell][0] / total

    def take_back(self, client: Tenant, cell: str) -> None:
        """The request just counted was none for this cell."""
        now_s, cells = self._clock(), self._counts.get(client.name, {})
        if cell in cells:
            cells[cell] = (max(self._faded(*cells[cell], now_s) - 1.0, 0.0), now_s)

    @staticmethod
    def _faded(count: float, at_s: float, now_s: float) -> float:
        return count * math.exp2(-(now_s - at_s) / _HALF_LIFE_S)
