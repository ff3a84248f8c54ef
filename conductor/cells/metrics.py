"""Prometheus metrics of a router of cells."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

requests = Counter(
    "moonpool_router_requests_total",
    "Answers passed on, by cell (empty: none) and status",
    ["cell", "status"],
)
moved = Counter(
    "moonpool_router_moved_total",
    "Requests that a cell did not answer and that went to the next one, by cell and reason (lost, full, "
    "unknown: it does not have what the request continues)",
    ["cell", "reason"],
)
broken = Counter(
    "moonpool_router_broken_streams_total", "Streams that broke because their cell was lost", ["cell"]
)
continued = Counter(
    "moonpool_router_continued_streams_total",
    "Those of them that another cell went on with to their end, by the cell that was lost",
    ["cell"],
)
prefixes = Counter(
    "moonpool_router_prefix_copies_total",
    "Hot prefixes of other cells that a cell has read when this router offered them, by that cell",
    ["cell"],
)
usable = Gauge("moonpool_router_cell_usable", "1 while the cell gets requests", ["cell"])
in_flight = Gauge(
    "moonpool_router_cell_requests", "Requests in flight in the cell, as it last told", ["cell"]
)
decision = Histogram(
    "moonpool_router_decision_seconds",
    "Time to hash a prompt and choose its cell",
    buckets=(2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 5e-3),
)
