"""Prometheus metrics of scheduling; those of requests are in ``request_metrics``."""

from __future__ import annotations

from functools import cache

from prometheus_client import Counter, Gauge, Histogram

placements = Counter("moonpool_placements_total", "Placements by reason, re-placements included", ["reason"])
placement_paths = Counter(
    "moonpool_placement_paths_total",
    "Placements by path: split over two nodes, whole on one, rest (whole on a decode node that computes the "
    "short rest of a prompt), or prefill alone",
    ["path"],
)
replacements = Counter("moonpool_replacements_total", "Placements that failed, by cause", ["cause"])
rejections = Counter(
    "moonpool_rejections_total",
    "Rejected requests: limit (of requests or tokens), arrival or decode (an SLO), nodes (they refused)",
    ["stage"],
)
bookings = Counter(
    "moonpool_bookings_total",
    "Placements booked among several conductors: kept, moved (the node got foreign load), full (no "
    "decode node had room), unavailable (the arbiter did not answer in time)",
    ["outcome"],
)
prefix_outcomes = Counter(
    "moonpool_prefix_outcomes_total",
    "Requests by the outcome of their prefix: hit, off, short, unused, pending, dropped, layout, salted, "
    "headed, new; and, of a hit, why it reached no further: unused, pending, dropped, layout, salted, "
    "new, or empty if every whole block was used (see docs/troubleshooting.md)",
    ["outcome", "missed"],
)
cache_hints = Counter(
    "moonpool_cache_hints_total",
    "Hints of requests about their cached blocks: done, sent (to a vLLM engine, which counts what comes of "
    "them), limited (by the tenant's limit, or what nodes keep), refused (too many at once), failed",
    ["outcome"],
)
first_token_moves = Histogram(
    "moonpool_first_token_moving_ratio",
    "Share of the time to the first token in which cached blocks moved, of requests that had some: fetched "
    "from another node, or loaded from its own memory or disk. speed: at most so many GB/s, of a fetch",
    ["path", "speed"],
    buckets=(0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0),
)
_SPEEDS = ("0.1", "1", "10")


def speed_class(nbytes: int, seconds: float) -> str:
    """Return the label ``speed`` of ``first_token_moves``."""
    gb_s = nbytes / max(seconds, 1e-9) / 1e9
    return next((bound for bound in _SPEEDS if gb_s <= float(bound)), "inf")


part_s = Counter(
    "moonpool_request_part_seconds_total",
    "Seconds of sequences that have ended, by part, as in their timelines: the parts sum to the seconds from "
    "arrival at the conductor to the end. What the API took before and after: moonpool_api_stage_seconds",
    ["part"],
)


@cache
def seconds_of(part: str) -> Counter:
    """``part_s`` of this label; cached, because every request adds to ten of them."""
    return part_s.labels(part)


migrations = Counter(
    "moonpool_migrations_total",
    "Running requests that were to move to another decode node, by cause (asked, drain, "
    "defragment, hot-spot, priority) and outcome: moved, or stayed",
    ["cause", "outcome"],
)
migration_downtime_s = Histogram(
    "moonpool_migration_downtime_seconds",
    "Seconds between the last token of one decode node and the first of the next, of requests that moved",
    buckets=(0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0),
)
migration_stages = Histogram(
    "moonpool_migration_stages",
    "Reads of a migration: all but the last ones while the request ran",
    buckets=(1, 2, 3, 4, 6, 8, 16, 32),
)
migrated_blocks = Counter(
    "moonpool_migrated_blocks_total",
    "KV blocks of requests that moved: read while they ran, read while they stood still, or there already",
    ["kind"],
)
cluster_nodes = Gauge(
    "moonpool_cluster_nodes",
    "Nodes this conductor knows, each replica by itself, by role and state (ready, unhealthy, draining, "
    "starting, unreachable, incompatible)",
    ["role", "state"],
)
clock_skew_s = Gauge(
    "moonpool_cluster_clock_skew_seconds",
    "Largest difference of a node's wall clock to the conductor's; `moonpool doctor` names the node",
)
missing_replicas = Gauge(
    "moonpool_cluster_missing_replicas",
    "Replicas that nodes should have and that are not in the index, by role",
    ["role"],
)
waits = Counter("moonpool_waits_for_node_total", "Requests that found no node of a role", ["role"])
hot_copies = Counter(
    "moonpool_hot_copies_total", "Copies of hot prefixes: made, failed, or released again", ["outcome"]
)
hot_nbytes = Counter("moonpool_hot_copied_bytes_total", "Bytes that copies of hot prefixes moved")
warmed_blocks = Counter(
    "moonpool_warmed_blocks_total", "Blocks of hot prefixes that joining nodes got before their first request"
)
hot_lost_blocks = Counter(
    "moonpool_hot_lost_blocks_total", "Blocks of prefixes in use that ended with the only node that had them"
)
hot_released_blocks = Counter(
    "moonpool_hot_released_blocks_total", "Blocks that nodes evicted because the copy is no longer wanted"
)
prediction_error_percent = Gauge(
    "moonpool_prediction_error_percent",
    "Absolute error of an estimate in percent of the measurement: a percentile of the latest 256",
    ["estimate", "percentile"],
)
prediction_error = Histogram(
    "moonpool_prediction_error_ratio",
    "Absolute error of an estimate, relative to the measurement",
    ["estimate"],
    buckets=(0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 2.0, 5.0, 10.0),
)
reuse_distance = Histogram(
    "moonpool_cluster_reuse_distance_blocks",
    "Different blocks used between two uses of the same block, of sampled blocks (the rate of sampling falls "
    "as there are more): the fraction below N is the hit rate of one LRU cache of N blocks, first uses "
    "counted as misses",
    buckets=[float(4**power) for power in range(2, 15)],
)
reuse_first_uses = Counter(
    "moonpool_cluster_reuse_first_uses_total", "Uses of sampled blocks never seen before, or long ago"
)
