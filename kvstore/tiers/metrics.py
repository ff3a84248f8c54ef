"""Prometheus metrics of the store. ``tier`` is pool, host or ssd."""

from __future__ import annotations

from functools import cache

from prometheus_client import Counter, Histogram

HIT_BLOCKS = Counter(
    "moonpool_store_hit_blocks_total", "Blocks of requests' chains that were held, by fastest tier.", ["tier"]
)
MISSED_BLOCKS = Counter(
    "moonpool_store_missed_blocks_total", "Blocks of requests' chains that were not held."
)
STALE_BLOCKS = Counter(
    "moonpool_store_stale_blocks_total",
    "Blocks that were said to be held and could not be had: computed instead.",
    ["tier"],
)
CORRUPT_BLOCKS = Counter(
    "moonpool_store_corrupt_blocks_total", "Copies dropped because their checksum did not match.", ["tier"]
)
EVICTED_BLOCKS = Counter(
    "moonpool_store_evicted_blocks_total",
    "Copies that left a tier: held below or above it too, to be written, dropped (nowhere to go), surplus (a "
    "copy for busy times that nobody used lately), orphaned (a block before it is gone), removed; quota: its "
    "tenant has too many.",
    ["tier", "reason"],
)
REFUSED_BLOCKS = Counter(
    "moonpool_store_refused_blocks_total", "Blocks host memory did not take: all pinned, or worth less."
)
WRITTEN_BLOCKS = Counter("moonpool_store_written_blocks_total", "Blocks written to disk.")
DROPPED_WRITES = Counter(
    "moonpool_store_dropped_writes_total",
    "Blocks that were to be written to disk and were not: the queue was full, the block or one before it was "
    "gone, or the disk did not take it.",
    ["reason"],
)
PROMOTED_BLOCKS = Counter("moonpool_store_promoted_blocks_total", "Blocks brought from disk to host memory.")
PREFETCHED_BLOCKS = Counter(
    "moonpool_store_prefetched_blocks_total",
    "Of those, brought ahead of their use: for prompts that wait for room in the pool.",
)
SECONDS = Histogram(
    "moonpool_store_seconds",
    "Seconds of one batch: load from a tier, store into it.",
    ["tier", "operation"],
    buckets=(0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0),
)


@cache
def evicted_blocks(tier: str, reason: str) -> Counter:
    """``EVICTED_BLOCKS`` of these labels. To find them anew is a tenth of what an eviction costs."""
    return EVICTED_BLOCKS.labels(tier, reason)


def evicted_totals() -> dict[str, dict[str, int]]:
    """``EVICTED_BLOCKS`` by tier and reason: what a node says of it to others."""
    found: dict[str, dict[str, int]] = {}
    for sample in next(iter(EVICTED_BLOCKS.collect())).samples:
        if sample.name.endswith("_total"):
            found.setdefault(sample.labels["tier"], {})[sample.labels["reason"]] = int(sample.value)
    return found
