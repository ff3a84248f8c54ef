"""What a store node's /metrics say besides its tiers' own."""

from __future__ import annotations

from prometheus_client import Counter

PUTS = Counter("moonpool_store_puts", "Objects put, by how it ended: done, expired or failed", ["end"])
LOOKUPS = Counter("moonpool_store_lookups", "Objects asked for, by whether they were here", ["result"])
EVICTED_OBJECTS = Counter(
    "moonpool_store_evicted_objects", "Objects dropped because a part of them was evicted or damaged"
)
DROPPED_SURPLUS = Counter(
    "moonpool_store_dropped_surplus", "Extra copies of objects dropped because room was needed"
)
DAMAGED_OBJECTS = Counter(
    "moonpool_store_damaged_objects", "Objects dropped because a reader found them damaged in memory"
)
COPIED_BYTES = Counter("moonpool_store_copied_bytes", "Bytes read from other nodes to keep a copy", ["shelf"])
