"""Prometheus metrics of the tiers of a process's stores."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from prometheus_client.core import REGISTRY, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from moonpool.kvstore.store.tiered import TieredStore

Stores = Callable[[], Sequence[tuple[str, TieredStore]]]


_BY_TIER = ["shelf", "tier"]


class _StoresCollector(Collector):
    def __init__(self, stores: Stores) -> None:
        self._stores = stores

    def collect(self) -> Iterator[Metric]:
        by_tier = (
            GaugeMetricFamily("moonpool_store_blocks", "Blocks a tier holds", labels=_BY_TIER),
            GaugeMetricFamily("moonpool_store_bytes", "Bytes of a tier's blocks", labels=_BY_TIER),
            GaugeMetricFamily("moonpool_store_room_blocks", "Blocks a tier has room for", labels=_BY_TIER),
            GaugeMetricFamily("moonpool_store_pinned_blocks", "Pinned blocks of a tier", labels=_BY_TIER),
            GaugeMetricFamily(
                "moonpool_store_load_bytes_per_second", "Recent load bandwidth of a tier", labels=_BY_TIER
            ),
        )
        queues = GaugeMetricFamily(
            "moonpool_store_queue_blocks",
            "Blocks in transit: write (to disk), demoting (those evicted from memory), promote (from disk)",
            labels=["shelf", "queue"],
        )
        leases = GaugeMetricFamily(
            "moonpool_store_leases", "Grants in effect: leases of readers, puts", labels=["shelf"]
        )
        for shelf, store in self._stores():
            stats = store.stats
            rates = {"host": stats.host_load_nbytes_per_s, "ssd": stats.ssd_load_nbytes_per_s}
            for tier in stats.tiers:
                counts = (tier.num_blocks, tier.nbytes, tier.capacity_blocks, tier.num_pinned)
                for family, value in zip(by_tier, (*counts, rates[tier.name]), strict=True):
                    family.add_metric([shelf, tier.name], value)
            queues.add_metric([shelf, "write"], stats.num_queued_writes)
            queues.add_metric([shelf, "demoting"], stats.num_demoting)
            queues.add_metric([shelf, "promote"], stats.num_promoting)
            leases.add_metric([shelf], stats.num_leases)
        yield from (*by_tier, queues, leases)


def observe_stores(stores: Stores) -> Collector:
    """Export the tiers of the current stores by shelf ("kv" or "objects"), until the collector is
    unregistered."""
    collector = _StoresCollector(stores)
    REGISTRY.register(collector)
    return collector
