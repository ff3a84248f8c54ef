"""What a store's tiers hold, for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import REGISTRY, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvstore.store.tiered_store import TieredStore


class _StoreCollector(Collector):
    """Reads the store's own counts at each scrape, so that a put pays nothing for them."""

    def __init__(self, store: TieredStore) -> None:
        self._store = store

    def collect(self) -> Iterator[Metric]:
        stats = self._store.stats
        blocks = GaugeMetricFamily("moonpool_store_blocks", "Blocks a tier holds", labels=["tier"])
        nbytes = GaugeMetricFamily("moonpool_store_bytes", "Bytes of a tier's blocks", labels=["tier"])
        room = GaugeMetricFamily("moonpool_store_room_blocks", "Blocks a tier has room for", labels=["tier"])
        pinned = GaugeMetricFamily(
            "moonpool_store_pinned_blocks", "Blocks of a tier that somebody reads", labels=["tier"]
        )
        rate = GaugeMetricFamily(
            "moonpool_store_load_bytes_per_second", "What loads from a tier gave lately", labels=["tier"]
        )
        rates = {"host": stats.host_load_nbytes_per_s, "ssd": stats.ssd_load_nbytes_per_s}
        for tier in stats.tiers:
            blocks.add_metric([tier.name], tier.num_blocks)
            nbytes.add_metric([tier.name], tier.nbytes)
            room.add_metric([tier.name], tier.capacity_blocks)
            pinned.add_metric([tier.name], tier.num_pinned)
            rate.add_metric([tier.name], rates[tier.name])
        yield from (blocks, nbytes, room, pinned, rate)
        queues = GaugeMetricFamily(
            "moonpool_store_queue_blocks",
            "Blocks on their way: to disk, of those out of host memory, from disk to host memory",
            labels=["queue"],
        )
        queues.add_metric(["write"], stats.num_queued_writes)
        queues.add_metric(["leaving"], stats.num_leaving)
        queues.add_metric(["promote"], stats.num_promoting)
        yield queues
        yield GaugeMetricFamily("moonpool_store_leases", "Leases that are held", value=stats.num_leases)


def observe_store(store: TieredStore) -> Collector:
    """Export what the store's tiers hold, until what is returned is unregistered. One store at a time."""
    collector = _StoreCollector(store)
    REGISTRY.register(collector)
    return collector
