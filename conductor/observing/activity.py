"""Counts and events of one conductor since its start, for the dashboard."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from heapq import nlargest
from typing import Any

from moonpool.conductor.observing import scheduling_metrics as core_metrics
from moonpool.conductor.observing.demand import DemandCounter
from moonpool.kvstore.eviction.reuse_distance import ReuseDistance

# Events kept; each has some hundred bytes.
_EVENTS_KEPT = 200
# Pairs of nodes that are counted; beyond, the pair without transfers for longest is dropped.
_MAX_ROUTES = 512
# Tenants that are counted, those that asked last; a snapshot names those with most prompt tokens. All others
# are one.
_MAX_TENANTS, _TENANTS_SHOWN = 1000, 100
_OTHERS = "(others)"


@dataclass(frozen=True, slots=True)
class ClusterEvent:
    """``kind``: joined, left, unhealthy, healthy, retry, evicted (in bulk), resync (of the index mirror),
    copied (a prefix), started or drained (by an operator or the planner), plan (a decision), migrated or
    stayed (a running request).
    """

    number: int  # increases by 1
    unix_s: float
    kind: str
    node: str
    text: str


@dataclass(slots=True)
class Route:
    """Totals of the transfers from one node to another."""

    source: str
    target: str
    transport: str = ""
    nbytes: int = 0
    seconds: float = 0.0
    transfers: int = 0
    failures: int = 0
    last_s: float = 0.0


@dataclass(slots=True)
class Activity:
    """Updated on the event loop; ``unix_clock``: wall time."""

    unix_clock: Callable[[], float]
    tokens: Counter[str] = field(default_factory=Counter)  # prompt tokens by source of their KV
    # Configured ones, the latest last: prompt tokens, cached ones, and by source as in ``tokens``.
    tenants: dict[str, Counter[str]] = field(default_factory=dict)
    reuse: ReuseDistance = field(
        default_factory=lambda: ReuseDistance(core_metrics.reuse_distance, core_metrics.reuse_first_uses)
    )
    demand: DemandCounter = field(default_factory=DemandCounter)
    placements: Counter[str] = field(default_factory=Counter)
    paths_taken: Counter[str] = field(default_factory=Counter)
    rejections: Counter[str] = field(default_factory=Counter)
    events: deque[ClusterEvent] = field(default_factory=lambda: deque(maxlen=_EVENTS_KEPT))
    _others: Counter[str] = field(default_factory=Counter)
    _routes: dict[tuple[str, str], Route] = field(default_factory=dict)
    _num_events: int = 0

    def prompt(self, tenant: str, tokens_by_source: Mapping[str, int]) -> None:
        """A prompt was prefilled: ``tokens_by_source`` names computed, pool, host, ssd and fetched."""
        self.tokens.update(tokens_by_source)
        if tenant:
            counts = self.tenants[tenant] = self.tenants.pop(tenant, Counter[str]())
            if len(self.tenants) > _MAX_TENANTS:
                self._others.update(self.tenants.pop(next(iter(self.tenants))))
            counts["prompt"] += sum(tokens_by_source.values())
            counts["cached"] += sum(tokens_by_source.values()) - tokens_by_source["computed"]
            counts.update(tokens_by_source)

    def moved(self, source: str, target: str, transport: str, nbytes: int, seconds: float) -> None:
        route = self._route(source, target)
        route.transport = transport or route.transport
        route.nbytes += nbytes
        route.seconds += seconds
        route.transfers += 1

    def not_moved(self, source: str, target: str) -> None:
        self._route(source, target).failures += 1

    def event(self, kind: str, node: str, text: str) -> None:
        self._num_events += 1
        self.events.append(ClusterEvent(self._num_events, self.unix_clock(), kind, node, text))

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types. All counts are totals, so that missed snapshots lose nothing."""
        return {
            "tokens": dict(self.tokens),
            "tenants": self._shown_tenants(),
            "placements": dict(self.placements),
            "placement_paths": dict(self.paths_taken),
            "rejections": dict(self.rejections),
            "routes": [asdict(route) for route in self._routes.values()],
            "reuse": {"num_uses": self.reuse.num_uses, "hit_ratios": self.reuse.hit_ratios()},
            "events": [asdict(event) for event in self.events],
        }

    def _shown_tenants(self) -> dict[str, dict[str, int]]:
        shown, others = self.tenants, self._others
        if len(shown) > _TENANTS_SHOWN:
            names = nlargest(_TENANTS_SHOWN, shown, key=lambda name: self.tenants[name]["prompt"])
            shown = {name: self.tenants[name] for name in names}
            others = sum((counts for name, counts in self.tenants.items() if name not in shown), others)
        return {name: dict(counts) for name, counts in {**shown, _OTHERS: others}.items() if counts}

    def _route(self, source: str, target: str) -> Route:
        route = self._routes.get((source, target))
        if route is None:
            if len(self._routes) >= _MAX_ROUTES:
                oldest = min(self._routes, key=lambda pair: self._routes[pair].last_s)
                del self._routes[oldest]
            route = self._routes[source, target] = Route(source, target)
        route.last_s = self.unix_clock()
        return route
