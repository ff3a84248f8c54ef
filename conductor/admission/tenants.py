"""Tenants of a cluster, their limits and weights."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

INTERACTIVE: Literal["interactive"] = "interactive"
BATCH: Literal["batch"] = "batch"

LEAST_WEIGHT = 1e-6

Regions = frozenset[str]
EVERYWHERE: Regions = frozenset()
"""No confinement, as of a tenant that names no regions."""


def may_hold(regions: Regions, region: str) -> bool:
    """Whether what is confined to ``regions`` may be in ``region``; empty: a place without a region."""
    return not regions or region in regions


@dataclass(frozen=True, slots=True)
class Tenant:
    """One tenant's limits. The default, without limits, is used where no tenants are configured."""

    name: str = ""
    weight: float = 1.0
    max_requests: int = 0  # 0: any number
    tokens_per_minute: int = 0  # 0: any number
    cached_nbytes: int = 0  # 0: as much as eviction leaves
    service_class: Literal["interactive", "batch"] = INTERACTIVE
    slo_ttft_s: float = 0.0  # of its requests; 0: as the cluster's
    slo_tbt_s: float = 0.0
    regions: Regions = EVERYWHERE  # that its prompts and KV are confined to
    home_region: str = ""  # where its requests come from; empty: the conductor's

    def limited_to(self, share: float) -> Tenant:
        """With this part of its limits, rounded up: a limit stays one."""
        parts = (math.ceil(limit * share) for limit in (self.max_requests, self.tokens_per_minute))
        max_requests, tokens_per_minute = parts
        return replace(self, max_requests=max_requests, tokens_per_minute=tokens_per_minute)

    @property
    def confinement(self) -> str:
        """A sentence's part about its regions."""
        return f"tenant {self.name} is confined to {', '.join(sorted(self.regions))}"

    def salt(self, cache_salt: str) -> str:
        """The salt of its block keys: prefixes are shared within one salt only. Empty: no tenant, no salt."""
        # With the length, ("a", "b/c") and ("a/b", "c") differ, and no salt is another tenant's name.
        return f"{len(self.name)}:{self.name}/{cache_salt}" if self.name or cache_salt else ""


ANYONE = Tenant()
