"""Prometheus metrics of the index."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

published_blocks = Counter(
    "moonpool_index_published_blocks_total", "Block changes published in the index.", ["change"]
)
publisher_connected = Gauge(
    "moonpool_index_publisher_connected", "1: this node's blocks are published; 0: Redis is lost."
)
registrations = Counter(
    "moonpool_index_registrations_total", "Times this node registered in the index with all its blocks."
)
mirror_connected = Gauge(
    "moonpool_index_mirror_connected", "1: the mirror follows the index; 0: Redis is lost."
)
mirror_lag = Gauge(
    "moonpool_index_mirror_lag_seconds", "Lag of the mirror behind the stream at the last look."
)
mirror_blocks = Gauge("moonpool_index_mirror_blocks", "Different blocks in the mirror.")
mirror_nodes = Gauge("moonpool_index_mirror_nodes", "Nodes in the mirror.")
mirror_events = Counter("moonpool_index_mirror_events_total", "Stream entries applied.")
skipped_entries = Counter(
    "moonpool_index_skipped_entries_total",
    "Records, batches and stream entries in Redis that were skipped: unreadable, forged (made without the "
    "cluster's key, or for another place), replayed, or expired.",
    ["reason"],
)
mirror_snapshots = Counter(
    "moonpool_index_mirror_snapshots_total", "Times the whole index was read.", ["cause"]
)  # start, gap, instance (Redis lost its data), history (it went back), failed (a defect here)
mirror_checks = Counter(
    "moonpool_index_mirror_checks_total", "Times a part of the mirror was compared with Redis."
)
mirror_difference = Gauge(
    "moonpool_index_mirror_difference_blocks", "Blocks in which the mirror differed at the last comparison."
)
mirror_differences = Counter(
    "moonpool_index_mirror_differences_total",
    "Blocks in which the mirror differed; their nodes are read again.",
)
stale_hits = Counter(
    "moonpool_index_stale_hits_total",
    "Blocks that placed a request and were missing, on the prefill node (local) or a peer: computed instead, "
    "and removed from the index.",
    ["where"],
)
reuse_distance = Histogram(
    "moonpool_reuse_distance_blocks",
    "Different blocks used between two uses of a watched block (the sample is halved as it grows). Its "
    "fraction below N is the hit rate of an LRU cache of N blocks, first uses counted as misses.",
    buckets=[float(4**power) for power in range(3, 13)],
)
reuse_first_uses = Counter(
    "moonpool_reuse_first_uses_total", "Uses of watched blocks never seen before, or long ago."
)
lapsed_nodes = Counter(
    "moonpool_index_lapsed_nodes_total", "Nodes whose lease ended, as this process was told."
)
