"""Prometheus metrics of KV events."""

from __future__ import annotations

from prometheus_client import Counter

batches = Counter("moonpool_kv_events_batches_total", "Batches of KV events read.")
corrupt_batches = Counter("moonpool_kv_events_corrupt_batches_total", "Batches that could not be read.")
replayed_batches = Counter("moonpool_kv_events_replayed_batches_total", "Batches asked for again, and got.")
lost_batches = Counter("moonpool_kv_events_lost_batches_total", "Batches that nobody has any more.")
skipped_blocks = Counter(
    "moonpool_kv_events_skipped_blocks_total",
    "Blocks an engine stored that cannot be found by their tokens: the block before is unknown (orphan), "
    "images or salts are in their hash (extra), they are not of the full attention (group), or tokens do not "
    "fill them (size).",
    ["reason"],
)
published_batches = Counter("moonpool_kv_events_published_batches_total", "Batches of KV events sent.")
