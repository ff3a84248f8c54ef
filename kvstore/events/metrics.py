"""Prometheus metrics of KV events."""

from __future__ import annotations

from prometheus_client import Counter

batches = Counter("moonpool_kv_events_batches_total", "Batches of KV events read.")
corrupt_batches = Counter("moonpool_kv_events_corrupt_batches_total", "Batches that could not be read.")
replayed_batches = Counter("moonpool_kv_events_replayed_batches_total", "Batches received by replay.")
lost_batches = Counter("moonpool_kv_events_lost_batches_total", "Batches that cannot be replayed.")
restarts = Counter("moonpool_kv_events_restarts_total", "Times an engine, or possibly one, began again.")
skipped_blocks = Counter(
    "moonpool_kv_events_skipped_blocks_total",
    "Blocks of an engine that their tokens do not identify: the block before is unknown (orphan), images or "
    "salts are in their hash (extra), they are not of full attention (group), or the size differs (size). "
    "Blocks in storage that is not the engine's own (remote), or beyond what one engine may have (full).",
    ["reason"],
)
published_batches = Counter("moonpool_kv_events_published_batches_total", "Batches of KV events sent.")
