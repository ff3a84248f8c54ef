"""Prometheus metrics of routes: names that stand for one of several models."""

from __future__ import annotations

from prometheus_client import Counter, Histogram

_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)

answered = Counter(
    "moonpool_route_requests_total", "Requests of a route by the model that answered", ["route", "model_name"]
)
escalations = Counter(
    "moonpool_route_escalations_total",
    "Answers of a cascade that were not used, by model and cause (unsure, short, failed)",
    ["route", "model_name", "cause"],
)
cost = Counter(
    "moonpool_route_cost_total",
    "Cost of the seconds of nodes that requests of a route took, drafts that were not used included",
    ["route"],
)
added = Histogram(
    "moonpool_route_added_seconds",
    "Time that requests spent on answers which were not used",
    ["route"],
    buckets=_BUCKETS,
)
canary_requests = Counter(
    "moonpool_canary_requests_total",
    "Requests for a model beside which another one is tried, by side (stable, candidate) and outcome (within "
    "or late, by the SLO; error)",
    ["model_name", "side", "outcome"],
)
held = Histogram(
    "moonpool_route_held_seconds",
    "Time that the first tokens of streams were held until it was known that the answer is used",
    ["route"],
    buckets=_BUCKETS,
)
