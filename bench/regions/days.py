"""A workload with a rate that follows the day of its region; other regions can serve part of it."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from moonpool.conductor.admission.tenants import EVERYWHERE, Regions
from moonpool.conductor.observing.slo import Slo
from moonpool.conductor.placing.cluster_view import ClusterView
from moonpool.conductor.placing.placement import DecodeEstimate, PrefillEstimate
from moonpool.conductor.placing.policies import Goodput, PrefillChoice
from moonpool.simulator.inputs.trace import TraceRequest
from moonpool.simulator.inputs.workload import Workload

ISOLATED, NEAREST, SUN, COST = "isolated", "nearest", "follow-the-sun", "cost-aware"
ROUTINGS = (ISOLATED, NEAREST, SUN, COST)


@dataclass(frozen=True)
class Days:
    """Regions with equal days, evenly shifted. ``swing``: of the rate, around ``rate``."""

    regions: Sequence[str]
    day_s: float
    rate: float  # sessions a second of each region, on average
    swing: float = 0.8

    def rate_at(self, region: str, now_s: float) -> float:
        phase = self.regions.index(region) / len(self.regions)
        return self.rate * (1 + self.swing * math.sin(2 * math.pi * (now_s / self.day_s - phase)))

    def night(self, now_s: float) -> str:
        """The region with the least to do."""
        return min(self.regions, key=lambda region: self.rate_at(region, now_s))

    def requests(self, routing: str, like: Workload) -> list[TraceRequest]:
        """Return one day of all regions; of the same ``like`` the same requests with each ``routing``."""
        found: list[TraceRequest] = []
        for number, region in enumerate(self.regions):
            facts = {name: getattr(like, name) for name in Workload.__slots__}
            day = _Day(**facts | {"seed": like.seed + number}, days=self, region=region, routing=routing)
            # Block ids of regions differ: a prefix is known where its users are.
            found += (
                replace(one, block_ids=tuple(len(self.regions) * each + number for each in one.block_ids))
                for one in day.requests()
            )
        return sorted(found, key=lambda one: one.arrival_s)


@dataclass(frozen=True)
class _Day(Workload):
    """The sessions of one region; ``sessions`` and ``rate`` do not count."""

    days: Days = Days((), 1.0, 1.0)
    region: str = ""
    routing: str = COST

    def _arrivals(self, rng: random.Random) -> Iterator[float]:
        now_s, most = 0.0, self.days.rate * (1 + self.days.swing)
        while (now_s := now_s + rng.expovariate(most)) < self.days.day_s:
            if rng.random() * most < self.days.rate_at(self.region, now_s):
                yield now_s

    def _session(
        self, rng: random.Random, arrival_s: float, ids: Iterator[int], systems: dict[int, list[int]]
    ) -> Iterator[TraceRequest]:
        regions = self._regions(rng.random(), arrival_s)
        for request in super()._session(rng, arrival_s, ids, systems):
            yield replace(request, origin=self.region, regions=regions)

    def _regions(self, draw: float, now_s: float) -> Regions:
        """Where the session may be served."""
        if self.routing == ISOLATED:
            return frozenset({self.region})
        if self.routing != SUN:
            return EVERYWHERE
        # By the clock alone: what exceeds a region's average goes where it is night.
        surplus = 1 - self.days.rate / self.days.rate_at(self.region, now_s)
        return frozenset({self.days.night(now_s) if draw < surplus else self.region})


@dataclass(frozen=True)
class Nearest(Goodput):
    """The nearest region with a node that keeps the TTFT SLO; where none does, the nearest."""

    name = "nearest"

    def prefill(self, candidates: Sequence[PrefillEstimate], view: ClusterView, slo: Slo) -> PrefillChoice:
        in_time = [one for one in candidates if one.ttft_s <= slo.ttft_s] or candidates
        rtt_s = min(one.rtt_s for one in in_time)
        return super().prefill([one for one in in_time if one.rtt_s == rtt_s], view, slo)

    def cost_s(self, prefill: PrefillEstimate, decode: DecodeEstimate) -> float:
        # Longer than any difference of the rest: distance decides.
        return super().cost_s(prefill, decode) + 1e4 * prefill.rtt_s
