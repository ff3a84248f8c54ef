"""Prometheus metrics of the backend. SGLang shows them on its own page of metrics."""

from __future__ import annotations

from prometheus_client import Counter

PAGES = Counter(
    "moonpool_hicache_pages",
    "Pages of SGLang's HiCache by operation (exists, get, set) and outcome: hit, miss, stored, present (it "
    "was there already) or failed (the store did not answer, refused, or is not asked for a moment)",
    ["operation", "outcome"],
)
MOVED_BYTES = Counter(
    "moonpool_hicache_bytes", "Bytes of pages moved between SGLang's host memory and the store", ["operation"]
)
