"""Prometheus metrics of each tenant's cached blocks; the number of labels is bounded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from prometheus_client.core import REGISTRY, CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from moonpool.kvstore.blocks.tier import Tier
from moonpool.kvstore.eviction.tenant_quota import TenantQuotas

# Names come from the conductors' file of tenants; there may be many.
MOST_TENANTS = 32


class TenantLabels:
    """Label the first tenants by name and all later ones "other"; no tenant is "none"."""

    def __init__(self, most: int = MOST_TENANTS) -> None:
        self._most = most
        self._named: set[str] = set()

    def of(self, tenant: str) -> str:
        if not tenant:
            return "none"
        if tenant not in self._named:
            if len(self._named) >= self._most:
                return "other"
            self._named.add(tenant)
        return tenant


class _TenantCollector(Collector):
    def __init__(self, quotas: TenantQuotas, labels: TenantLabels) -> None:
        self._quotas = quotas
        self._labels = labels

    def collect(self) -> Iterator[Metric]:
        blocks = GaugeMetricFamily(
            "moonpool_tenant_blocks",
            "Blocks a tenant with cached_nbytes has in a tier, each counted in its fastest",
            labels=["tenant", "tier"],
        )
        nbytes = GaugeMetricFamily(
            "moonpool_tenant_bytes", "Bytes of moonpool_tenant_blocks", labels=["tenant", "tier"]
        )
        evicted = CounterMetricFamily(
            "moonpool_tenant_evicted_blocks",
            "Blocks of such a tenant that left the node: quota (it had too many), room (as any may)",
            labels=["tenant", "reason"],
        )
        num_blocks: Counter[tuple[str, str]] = Counter()
        num_evicted: Counter[tuple[str, str]] = Counter()
        for tenant, usage in self._quotas.usage().items():
            label = self._labels.of(tenant)
            for tier in Tier:
                num_blocks[label, tier.name.lower()] += usage.num_blocks[tier]
            for reason, count in usage.num_evicted.items():
                num_evicted[label, reason] += count
        for labels, count in num_blocks.items():
            blocks.add_metric(labels, count)
            nbytes.add_metric(labels, count * self._quotas.block_nbytes)
        for labels, count in num_evicted.items():
            evicted.add_metric(labels, count)
        yield from (blocks, nbytes, evicted)


def observe_tenants(quotas: TenantQuotas, labels: TenantLabels) -> Collector:
    """Export tenants' blocks until the returned collector is unregistered."""
    collector = _TenantCollector(quotas, labels)
    REGISTRY.register(collector)
    return collector
