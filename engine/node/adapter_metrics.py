"""Prometheus metrics of an engine's LoRA adapters."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from moonpool.engine.engine import Engine


def adapter_metrics(engine: Engine) -> Iterator[Metric]:
    """Yield them as of now; nothing before a request has named an adapter."""
    adapters, counts = engine.adapters, engine.adapters.counts
    num_requests = counts.hits + counts.misses
    if not num_requests:
        return
    yield GaugeMetricFamily(
        "moonpool_adapter_residents", "LoRA adapters in the KV pool", value=len(adapters.digests)
    )
    blocks = GaugeMetricFamily(
        "moonpool_adapter_blocks",
        "Blocks of the KV pool with LoRA adapters: used by requests, or idle",
        labels=["state"],
    )
    blocks.add_metric(["used"], adapters.num_used_blocks)
    blocks.add_metric(["idle"], adapters.num_blocks - adapters.num_used_blocks)
    yield blocks
    yield GaugeMetricFamily(
        "moonpool_adapter_hit_ratio",
        "Requests that found their LoRA adapter in memory over all with one, since the start",
        value=counts.hits / num_requests,
    )
    yield CounterMetricFamily(
        "moonpool_adapter_requests", "Requests with a LoRA adapter on this node", value=num_requests
    )
    yield CounterMetricFamily(
        "moonpool_adapter_hits", "Requests that found their LoRA adapter in memory", value=counts.hits
    )
    loads = CounterMetricFamily(
        "moonpool_adapter_loads",
        "LoRA adapters loaded, by source: host (memory) or ssd of the store, peer, or file",
        labels=["source"],
    )
    seconds = CounterMetricFamily(
        "moonpool_adapter_load_seconds", "Seconds of loads of LoRA adapters by source", labels=["source"]
    )
    for source, count in counts.loads_from.items():
        loads.add_metric([source], count)
        seconds.add_metric([source], counts.load_s_from[source])
    yield from (loads, seconds)
    yield CounterMetricFamily(
        "moonpool_adapter_failed_loads", "LoRA adapters that could not be loaded", value=counts.failed_loads
    )
    yield CounterMetricFamily(
        "moonpool_adapter_evictions",
        "LoRA adapters that left the KV pool for other adapters or for KV",
        value=counts.evictions,
    )
    yield CounterMetricFamily(
        "moonpool_adapter_hidden_load_seconds",
        "Seconds of these loads beside other work of the requests that wanted them",
        value=counts.hidden_load_s,
    )
