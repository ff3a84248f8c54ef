"""Prometheus metrics of a node's host and GPUs, from the latest reading."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial

from prometheus_client import REGISTRY
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from moonpool.runtime.health.judge import CHECKS, Judgement
from moonpool.runtime.health.readings import THROTTLES, GpuReading, Readings

# Label values and value of a sample; None: not known, no sample.
Sample = tuple[tuple[str, ...], float | None]
Family = Callable[[], GaugeMetricFamily | CounterMetricFamily]

_HEALTH = partial(
    GaugeMetricFamily,
    "moonpool_node_health",
    "1: within its limit (health.*); 0: the node is unhealthy",
    labels=["check"],
)
_MEMORY = partial(
    GaugeMetricFamily, "moonpool_host_memory_bytes", "Memory of the machine or container", labels=["state"]
)
_FILES = partial(
    GaugeMetricFamily, "moonpool_process_files", "File descriptors of this process", labels=["state"]
)
# By attribute of a HostReading.
_OF_HOST: dict[str, Family] = {
    "memory_stalled_s": partial(
        CounterMetricFamily,
        "moonpool_host_memory_stalled_seconds",
        "Time in which all processes of the host waited for memory",
    ),
    "cpu_ratio": partial(GaugeMetricFamily, "moonpool_host_cpu_ratio", "Utilization of all cores"),
    "network_nbytes": partial(
        CounterMetricFamily,
        "moonpool_host_network_bytes",
        "Bytes sent and received on all interfaces except the loopback",
    ),
    "network_errors": partial(
        CounterMetricFamily, "moonpool_host_network_errors", "Packets with errors and dropped packets"
    ),
    "energy_joules": partial(
        CounterMetricFamily,
        "moonpool_host_energy_joules",
        "Energy of the machine's processors since this process started (RAPL); absent: not available",
    ),
}
_DISK_FREE = partial(GaugeMetricFamily, "moonpool_host_disk_free_bytes", "Free space at store.ssd.path")
_DISK_WRITE = partial(
    GaugeMetricFamily,
    "moonpool_host_disk_write_seconds",
    "Duration of a durable write of a page at store.ssd.path",
)
# By attribute of a GpuReading.
_OF_GPU: dict[str, Family] = {
    "utilization": partial(
        GaugeMetricFamily,
        "moonpool_gpu_utilization_ratio",
        "Fraction of the time that a GPU computes",
        labels=["gpu"],
    ),
    "temperature_celsius": partial(
        GaugeMetricFamily, "moonpool_gpu_temperature_celsius", "Temperature of a GPU", labels=["gpu"]
    ),
    "power_watts": partial(
        GaugeMetricFamily, "moonpool_gpu_power_watts", "Power draw of a GPU", labels=["gpu"]
    ),
    "clock_hertz": partial(
        GaugeMetricFamily, "moonpool_gpu_clock_hertz", "Clock of a GPU's multiprocessors", labels=["gpu"]
    ),
    "energy_joules": partial(
        CounterMetricFamily,
        "moonpool_gpu_energy_joules",
        "Energy of a GPU since this process started (NVML); absent: not available",
        labels=["gpu"],
    ),
    "memory_taken_nbytes": partial(
        GaugeMetricFamily,
        "moonpool_gpu_memory_taken_bytes",
        "Memory of a GPU that others took since the node sized its pool: less is free than the pool believes",
        labels=["gpu"],
    ),
}
_GPU_MEMORY = partial(
    GaugeMetricFamily, "moonpool_gpu_memory_bytes", "Memory of a GPU", labels=["gpu", "state"]
)
_GPU_ERRORS = partial(
    CounterMetricFamily,
    "moonpool_gpu_memory_errors",
    "ECC errors since the driver started",
    labels=["gpu", "kind"],
)
_XID = partial(
    GaugeMetricFamily,
    "moonpool_gpu_xid",
    "1: the driver reported this error (Xid) since the node started",
    labels=["gpu", "xid"],
)
_THROTTLED = partial(
    GaugeMetricFamily,
    "moonpool_gpu_throttled",
    "1: the clock is reduced for this reason",
    labels=["gpu", "reason"],
)


class HealthCollector(Collector):
    """Registers itself; the owner unregisters it."""

    def __init__(self, judgement_fn: Callable[[], Judgement]) -> None:
        self._judgement_fn = judgement_fn
        REGISTRY.register(self)

    def collect(self) -> Iterator[Metric]:
        judgement = self._judgement_fn()
        yield _filled(_HEALTH, (((check,), float(check not in judgement.problems)) for check in CHECKS))
        if judgement.latest is not None:
            yield from _host(judgement.latest)
            yield from _gpus(judgement.latest.gpus)


def _filled(new_family: Family, samples: Iterable[Sample]) -> Metric:
    family = new_family()
    for labels, value in samples:
        if value is not None:
            family.add_metric(labels, value)
    return family


def _host(now: Readings) -> Iterator[Metric]:
    host, disk = now.host, now.disk
    available = host.memory_available_nbytes
    yield _filled(_MEMORY, [(("available",), available), (("used",), host.memory_nbytes - available)])
    unused = max(host.max_files - host.open_files, 0)
    yield _filled(_FILES, [(("open",), host.open_files), (("unused",), unused)])
    for attribute, family in _OF_HOST.items():
        yield _filled(family, [((), getattr(host, attribute))])
    free, write_s = (disk.free_nbytes, disk.write_s) if disk is not None else (None, None)
    yield _filled(_DISK_FREE, [((), free)])
    yield _filled(_DISK_WRITE, [((), write_s)])


def _gpus(gpus: tuple[GpuReading, ...]) -> Iterator[Metric]:
    for attribute, family in _OF_GPU.items():
        yield _filled(family, [((gpu.gpu,), getattr(gpu, attribute)) for gpu in gpus])
    memory: list[Sample] = []
    for gpu in gpus:
        if gpu.memory_used_nbytes is not None and gpu.memory_nbytes is not None:
            memory.append(((gpu.gpu, "used"), gpu.memory_used_nbytes))
            memory.append(((gpu.gpu, "free"), gpu.memory_nbytes - gpu.memory_used_nbytes))
    yield _filled(_GPU_MEMORY, memory)
    errors: list[Sample] = [((gpu.gpu, "corrected"), gpu.corrected_errors) for gpu in gpus]
    errors += [((gpu.gpu, "uncorrected"), gpu.uncorrected_errors) for gpu in gpus]
    yield _filled(_GPU_ERRORS, errors)
    yield _filled(_XID, [((gpu.gpu, str(xid)), 1.0) for gpu in gpus for xid in gpu.xids])
    throttled = [
        ((gpu.gpu, reason), float(reason in gpu.throttles))
        for gpu in gpus
        if not gpu.lost
        for reason in THROTTLES
    ]
    yield _filled(_THROTTLED, throttled)
