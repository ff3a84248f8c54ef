"""Prometheus metrics of the store. ``tier`` is pool, host or ssd."""

from __future__ import annotations

from functools import cache

from prometheus_client import Counter, Histogram

HIT_BLOCKS = Counter(
    "moonpool_store_hit_blocks_total", "Blocks of requests' chains that were found.", ["tier"]
)
MISSED_BLOCKS = Counter(
    "moonpool_store_missed_blocks_total", "Blocks of requests' chains that were not found."
)
STALE_BLOCKS = Counter(
    "moonpool_store_stale_blocks_total",
    "Blocks that were found and then could not be read: computed instead.",
    ["tier"],
)
CORRUPT_BLOCKS = Counter(
    "moonpool_store_corrupt_blocks_total", "Copies dropped because their checksum did not match.", ["tier"]
)
EVICTED_BLOCKS = Counter(
    "moonpool_store_evicted_blocks_total",
    "Copies that left a tier. below, above: another tier has the block; written: it goes to disk; dropped: "
    "it is lost; surplus: an unused extra copy; orphaned: its predecessor is gone; "
    "failed: copying it failed; removed; quota.",
    ["tier", "reason"],
)
REFUSED_BLOCKS = Counter(
    "moonpool_store_refused_blocks_total", "Blocks host memory refused: all are pinned or worth more."
)
WRITTEN_BLOCKS = Counter("moonpool_store_written_blocks_total", "Blocks written to disk.")
DROPPED_WRITES = Counter(
    "moonpool_store_dropped_writes_total",
    "Blocks not written to disk: the queue was full, the disk stalled or refused, or a predecessor was gone.",
    ["reason"],
)
PROMOTED_BLOCKS = Counter("moonpool_store_promoted_blocks_total", "Blocks read from disk into host memory.")
PREFETCHED_BLOCKS = Counter(
    "moonpool_store_prefetched_blocks_total",
    "Promoted blocks read ahead of their use: for prompts that wait for room in the pool.",
)
SECONDS = Histogram(
    "moonpool_store_seconds",
    "Seconds of one batch: load from a tier, store into it.",
    ["tier", "operation"],
    buckets=(0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0),
)


@cache
def evicted_blocks(tier: str, reason: str) -> Counter:
    """``EVICTED_BLOCKS`` of these labels; cached, because the lookup is a tenth of an eviction's cost."""
    return EVICTED_BLOCKS.labels(tier, reason)


def evicted_totals() -> dict[str, dict[str, int]]:
    """``EVICTED_BLOCKS`` by tier and reason, for the node's record."""
    found: dict[str, dict[str, int]] = {}
    for sample in next(iter(EVICTED_BLOCKS.collect())).samples:
        if sample.name.endswith("_total"):
            found.setdefault(sample.labels["tier"], {})[sample.labels["reason"]] = int(sample.value)
    return found
