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
    "moonpool_index_registrations_total", "Times this node registered in the index, each with all it held."
)
mirror_connected = Gauge(
    "moonpool_index_mirror_connected", "1: the mirror follows the index; 0: Redis is lost."
)
mirror_lag = Gauge(
    "moonpool_index_mirror_lag_seconds", "How far the mirror was behind the stream when last looked."
)
mirror_blocks = Gauge("moonpool_index_mirror_blocks", "Different blocks the mirror knows.")
mirror_nodes = Gauge("moonpool_index_mirror_nodes", "Nodes the mirror knows.")
mirror_events = Counter("moonpool_index_mirror_events_total", "Stream entries applied.")
mirror_corrupt_events = Counter(
    "moonpool_index_mirror_corrupt_events_total", "Stream entries that could not be read, and were skipped."
)
mirror_snapshots = Counter(
    "moonpool_index_mirror_snapshots_total", "Times the whole index was read.", ["cause"]
)  # start, gap, instance (Redis lost its data), history (it went back)
mirror_checks = Counter(
    "moonpool_index_mirror_checks_total", "Times a part of the mirror was compared with Redis."
)
mirror_difference = Gauge(
    "moonpool_index_mirror_difference_blocks", "Blocks in which the mirror differed when last compared."
)
mirror_differences = Counter(
    "moonpool_index_mirror_differences_total",
    "Blocks in which the mirror differed; their nodes are read again.",
)
stale_hits = Counter(
    "moonpool_index_stale_hits_total",
    "Blocks a request was placed by that were not there: computed instead, and taken out of the index. Where "
    "they should have been: on the prefill node itself (local) or at a peer.",
    ["where"],
)
reuse_distance = Histogram(
    "moonpool_reuse_distance_blocks",
    "Different blocks used between two uses of one, of the blocks that are watched (a share that is halved "
    "as there are more): its share below N is the hit rate of an LRU cache of N blocks, first uses counted "
    "as misses.",
    buckets=[float(4**power) for power in range(3, 13)],
)
reuse_first_uses = Counter(
    "moonpool_reuse_first_uses_total", "Uses of watched blocks never seen before, or long ago."
)
lapsed_nodes = Counter(
    "moonpool_index_lapsed_nodes_total", "Nodes this process dropped because their lease ended."
)
