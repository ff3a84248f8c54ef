"""Prometheus metrics of a node's host and GPUs, from the latest reading."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client import REGISTRY
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from moonpool.runtime.health.judge import CHECKS, Judgement
from moonpool.runtime.health.readings import THROTTLES, GpuReading, Readings

# Label values and value of a sample; None: not known, no sample.
Sample = tuple[tuple[str, ...], float | None]


class HealthCollector(Collector):
    """Registers itself; the owner unregisters it."""

    def __init__(self, judgement_fn: Callable[[], Judgement]) -> None:
        self._judgement_fn = judgement_fn
        REGISTRY.register(self)

    def collect(self) -> Iterator[Metric]:
        judgement = self._judgement_fn()
        checks = (((check,), float(check not in judgement.problems)) for check in CHECKS)
        text = "1: within its limit (health.*); 0: the node is unhealthy"
        yield _gauge("moonpool_node_health", text, checks, ["check"])
        if judgement.latest is not None:
            yield from _host(judgement.latest)
            yield from _gpus(judgement.latest.gpus)


def _gauge(name: str, text: str, samples: Iterable[Sample], labels: Iterable[str] = ()) -> Metric:
    return _filled(GaugeMetricFamily(name, text, labels=list(labels)), samples)


def _counter(name: str, text: str, samples: Iterable[Sample], labels: Iterable[str] = ()) -> Metric:
    return _filled(CounterMetricFamily(name, text, labels=list(labels)), samples)


def _filled(family: GaugeMetricFamily | CounterMetricFamily, samples: Iterable[Sample]) -> Metric:
    for labels, value in samples:
        if value is not None:
            family.add_metric(labels, value)
    return family


def _host(now: Readings) -> Iterator[Metric]:
    host, disk = now.host, now.disk
    available = host.memory_available_nbytes
    memory = [(("available",), available), (("used",), host.memory_nbytes - available)]
    yield _gauge("moonpool_host_memory_bytes", "Memory of the machine or container", memory, ["state"])
    text = "Time in which all processes of the host waited for memory"
    yield _counter("moonpool_host_memory_stalled_seconds", text, [((), host.memory_stalled_s)])
    files = [(("open",), host.open_files), (("unused",), max(host.max_files - host.open_files, 0))]
    yield _gauge("moonpool_process_files", "File descriptors of this process", files, ["state"])
    yield _gauge("moonpool_host_cpu_ratio", "Utilization of all cores", [((), host.cpu_ratio)])
    text = "Bytes sent and received on all interfaces except the loopback"
    yield _counter("moonpool_host_network_bytes", text, [((), host.network_nbytes)])
    text = "Packets with errors and dropped packets"
    yield _counter("moonpool_host_network_errors", text, [((), host.network_errors)])
    text = "Energy of the machine's processors since this process started (RAPL); absent: not available"
    yield _counter("moonpool_host_energy_joules", text, [((), host.energy_joules)])
    free, write_s = (disk.free_nbytes, disk.write_s) if disk is not None else (None, None)
    yield _gauge("moonpool_host_disk_free_bytes", "Free space at store.ssd.path", [((), free)])
    text = "Duration of a durable write of a page at store.ssd.path"
    yield _gauge("moonpool_host_disk_write_seconds", text, [((), write_s)])


def _gpus(gpus: tuple[GpuReading, ...]) -> Iterator[Metric]:
    for name, text, attribute in (
        ("utilization_ratio", "Fraction of the time that a GPU computes", "utilization"),
        ("temperature_celsius", "Temperature of a GPU", "temperature_celsius"),
        ("power_watts", "Power draw of a GPU", "power_watts"),
        ("clock_hertz", "Clock of a GPU's multiprocessors", "clock_hertz"),
    ):
        samples = [((gpu.gpu,), getattr(gpu, attribute)) for gpu in gpus]
        yield _gauge(f"moonpool_gpu_{name}", text, samples, ["gpu"])
    energy = [((gpu.gpu,), gpu.energy_joules) for gpu in gpus]
    text = "Energy of a GPU since this process started (NVML); absent: not available"
    yield _counter("moonpool_gpu_energy_joules", text, energy, ["gpu"])
    memory: list[Sample] = []
    for gpu in gpus:
        if gpu.memory_used_nbytes is not None and gpu.memory_nbytes is not None:
            memory.append(((gpu.gpu, "used"), gpu.memory_used_nbytes))
            memory.append(((gpu.gpu, "free"), gpu.memory_nbytes - gpu.memory_used_nbytes))
    yield _gauge("moonpool_gpu_memory_bytes", "Memory of a GPU", memory, ["gpu", "state"])
    taken = [((gpu.gpu,), gpu.memory_taken_nbytes) for gpu in gpus]
    text = (
        "Memory of a GPU that others took since the node sized its pool: less is free than the pool believes"
    )
    yield _gauge("moonpool_gpu_memory_taken_bytes", text, taken, ["gpu"])
    errors: list[Sample] = [((gpu.gpu, "corrected"), gpu.corrected_errors) for gpu in gpus]
    errors += [((gpu.gpu, "uncorrected"), gpu.uncorrected_errors) for gpu in gpus]
    text = "ECC errors since the driver started"
    yield _counter("moonpool_gpu_memory_errors", text, errors, ["gpu", "kind"])
    xids = [((gpu.gpu, str(xid)), 1.0) for gpu in gpus for xid in gpu.xids]
    text = "1: the driver reported this error (Xid) since the node started"
    yield _gauge("moonpool_gpu_xid", text, xids, ["gpu", "xid"])
    throttled = [
        ((gpu.gpu, reason), float(reason in gpu.throttles))
        for gpu in gpus
        if not gpu.lost
        for reason in THROTTLES
    ]
    text = "1: the clock is reduced for this reason"
    yield _gauge("moonpool_gpu_throttled", text, throttled, ["gpu", "reason"])
