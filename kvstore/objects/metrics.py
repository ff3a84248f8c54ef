"""What a store node's /metrics say besides its tiers' own."""

from __future__ import annotations

from prometheus_client import Counter

PUTS = Counter("moonpool_store_puts", "Objects put, by how it ended: done, expired or failed", ["end"])
LOOKUPS = Counter("moonpool_store_lookups", "Objects asked for, by whether they were here", ["result"])
EVICTED_OBJECTS = Counter(
    "moonpool_store_evicted_objects",
    "Objects dropped, by why: room (a part had to make room, or was damaged on disk), surplus (an extra copy "
    "nobody read lately), quota (its tenant has too much) or damaged (as a reader found)",
    ["reason"],
)
COPIED_BYTES = Counter("moonpool_store_copied_bytes", "Bytes read from other nodes to keep a copy", ["shelf"])
