"""Prometheus metrics of objects on a store node."""

from __future__ import annotations

from prometheus_client import Counter

PUTS = Counter("moonpool_store_puts", "Puts of objects by outcome: done, expired or failed", ["end"])
LOOKUPS = Counter("moonpool_store_lookups", "Lookups of objects by result", ["result"])
EVICTED_OBJECTS = Counter(
    "moonpool_store_evicted_objects",
    "Objects dropped by reason: room (a chunk was evicted or damaged on disk), surplus (an unused copy), "
    "quota (of its tenant) or damaged (found by a reader)",
    ["reason"],
)
REPAIRED_OBJECTS = Counter(
    "moonpool_store_repaired_objects", "Objects copied to another node because a copy was lost"
)
COPIED_BYTES = Counter("moonpool_store_copied_bytes", "Bytes read from other nodes to keep a copy", ["shelf"])
