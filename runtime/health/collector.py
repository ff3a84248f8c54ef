"""What a node's /metrics says of its host and GPUs, as of the last reading."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import REGISTRY
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from moonpool.runtime.health.judge import CHECKS, Judgement
from moonpool.runtime.health.readings import THROTTLES, GpuReading, Readings


class HealthCollector(Collector):
    """Registered by whoever watches, and unregistered with it."""

    def __init__(self, judgement_fn: Callable[[], Judgement]) -> None:
        self._judgement_fn = judgement_fn
        REGISTRY.register(self)

    def collect(self) -> Iterator[Metric]:
        judgement = self._judgement_fn()
        health = GaugeMetricFamily(
            "moonpool_node_health",
            "1: within its limit (health.*); 0: the node is unhealthy",
            labels=["check"],
        )
        for check in CHECKS:
            health.add_metric([check], 0.0 if check in judgement.problems else 1.0)
        yield health
        if judgement.latest is not None:
            yield from _host(judgement.latest)
            yield from _gpus(judgement.latest.gpus)


def _host(now: Readings) -> Iterator[Metric]:
    host, disk = now.host, now.disk
    memory = GaugeMetricFamily(
        "moonpool_host_memory_bytes", "Memory of the machine or container", labels=["state"]
    )
    memory.add_metric(["available"], host.memory_available_nbytes)
    memory.add_metric(["used"], host.memory_nbytes - host.memory_available_nbytes)
    yield memory
    yield GaugeMetricFamily("moonpool_host_cpu_ratio", "Share of all cores in use", value=host.cpu_ratio)
    yield CounterMetricFamily(
        "moonpool_host_network_bytes",
        "Bytes through all interfaces but the loopback, both ways",
        value=host.network_nbytes,
    )
    yield CounterMetricFamily(
        "moonpool_host_network_errors", "Packets with errors, or dropped", value=host.network_errors
    )
    free = GaugeMetricFamily("moonpool_host_disk_free_bytes", "Space free where store.ssd.path is")
    written = GaugeMetricFamily(
        "moonpool_host_disk_write_seconds", "Until a page was durable at store.ssd.path"
    )
    if disk is not None:
        written.add_metric([], disk.write_s)
        if disk.free_nbytes is not None:
            free.add_metric([], disk.free_nbytes)
    yield from (free, written)


def _gpus(gpus: tuple[GpuReading, ...]) -> Iterator[Metric]:
    used = GaugeMetricFamily(
        "moonpool_gpu_utilization_ratio", "Share of the time it computes", labels=["gpu"]
    )
    memory = GaugeMetricFamily("moonpool_gpu_memory_bytes", "Memory of a GPU", labels=["gpu", "state"])
    heat = GaugeMetricFamily("moonpool_gpu_temperature_celsius", "Temperature of a GPU", labels=["gpu"])
    power = GaugeMetricFamily("moonpool_gpu_power_watts", "What a GPU draws", labels=["gpu"])
    clock = GaugeMetricFamily("moonpool_gpu_clock_hertz", "Clock of its multiprocessors", labels=["gpu"])
    errors = CounterMetricFamily(
        "moonpool_gpu_memory_errors", "ECC errors since the driver started", labels=["gpu", "kind"]
    )
    throttled = GaugeMetricFamily(
        "moonpool_gpu_throttled", "1: its clock is held down for this reason", labels=["gpu", "reason"]
    )
    for gpu in gpus:
        single = (
            (used, gpu.utilization),
            (heat, gpu.temperature_celsius),
            (power, gpu.power_watts),
            (clock, gpu.clock_hertz),
        )
        for family, value in single:
            if value is not None:
                family.add_metric([gpu.gpu], value)
        if gpu.memory_used_nbytes is not None and gpu.memory_nbytes is not None:
            memory.add_metric([gpu.gpu, "used"], gpu.memory_used_nbytes)
            memory.add_metric([gpu.gpu, "free"], gpu.memory_nbytes - gpu.memory_used_nbytes)
        for kind, count in (("corrected", gpu.corrected_errors), ("uncorrected", gpu.uncorrected_errors)):
            if count is not None:
                errors.add_metric([gpu.gpu, kind], count)
        for reason in THROTTLES if not gpu.lost else ():
            throttled.add_metric([gpu.gpu, reason], float(reason in gpu.throttles))
    yield from (used, memory, heat, power, clock, errors, throttled)
