"""Decision whether a node is healthy, from readings of its host and GPUs. Pure, with hysteresis."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from moonpool.runtime.config.options import HealthOptions
from moonpool.runtime.health.readings import HARDWARE_THROTTLES, GpuReading, Readings

CHECKS = (
    "gpu_lost",
    "gpu_memory_errors",
    "gpu_xid",
    "gpu_memory_taken",
    "gpu_temperature",
    "gpu_throttled",
    "host_memory",
    "memory_pressure",
    "open_files",
    "disk_space",
    "disk_latency",
    "network_errors",
)
# Results may be wrong and waiting does not help: the GPU must be reset.
FATAL = frozenset({"gpu_lost", "gpu_memory_errors", "gpu_xid"})
# Errors of programs, after which a GPU is sound. Source: the list of NVIDIA's device plugin for Kubernetes.
XIDS_OF_PROGRAMS = frozenset({13, 31, 43, 45, 68, 109})


@dataclass(frozen=True, slots=True)
class Judgement:
    """The state after a number of readings. ``problems``: check -> reason, a sentence; empty: healthy.

    A check fails after ``health.bad_readings`` in a row beyond its limit, and recovers after
    ``health.good_readings`` in a row within it, so that a value near its limit does not flap.
    """

    problems: Mapping[str, str] = field(default_factory=dict)
    against: Mapping[str, int] = field(default_factory=dict)  # consecutive readings that contradict the state
    latest: Readings | None = None
    first_errors: Mapping[str, int] = field(default_factory=dict)  # uncorrected ones at the start, by GPU
    throttled_since_s: Mapping[str, float] = field(default_factory=dict)  # by GPU

    @property
    def healthy(self) -> bool:
        return not self.problems

    @property
    def reasons(self) -> tuple[str, ...]:
        """The problems in the order of ``CHECKS``."""
        return tuple(self.problems[check] for check in CHECKS if check in self.problems)

    @property
    def fatal(self) -> bool:
        """Whether the process must end and a person must look at the GPU."""
        return not FATAL.isdisjoint(self.problems)


def judge(before: Judgement, now: Readings, limits: HealthOptions) -> Judgement:
    """The state after one more reading."""
    first_errors = _first_errors(before, now)
    since_s = _throttled_since(before, now)
    beyond = dict(_beyond(before, now, limits, first_errors, since_s))
    problems, against = dict[str, str](), dict[str, int]()
    for check in CHECKS:
        bad, was_bad = check in beyond, check in before.problems
        num_against = before.against.get(check, 0) + 1 if bad != was_bad else 0
        needed = limits.good_readings if was_bad else limits.bad_readings
        if num_against < needed:
            bad = was_bad
            if num_against:
                against[check] = num_against
        if bad:
            problems[check] = beyond.get(check) or before.problems[check]
    return Judgement(problems, against, now, first_errors, since_s)


def _beyond(
    before: Judgement,
    now: Readings,
    limits: HealthOptions,
    first_errors: Mapping[str, int],
    since_s: Mapping[str, float],
) -> Iterator[tuple[str, str]]:
    """(check, sentence) for each limit that this reading violates; the last one counts for several GPUs."""
    for gpu in now.gpus:
        throttled_s = now.now_s - since_s.get(gpu.gpu, now.now_s)
        yield from _gpu(gpu, limits, first_errors.get(gpu.gpu, 0), throttled_s)
    host = now.host
    fraction = host.memory_available_nbytes / max(host.memory_nbytes, 1)
    if fraction < limits.host_memory_free:
        yield (
            "host_memory",
            f"host memory: {_gib(host.memory_available_nbytes)} of {_gib(host.memory_nbytes)} are available "
            f"({fraction:.1%}, less than {limits.host_memory_free:.1%})",
        )
    if limits.open_files_free and host.open_files > (1 - limits.open_files_free) * host.max_files:
        yield "open_files", f"this process has {host.open_files} of at most {host.max_files} files open"
    yield from _disk(now, limits)
    if before.latest is None:
        return
    span_s = max(now.now_s - before.latest.now_s, 1e-3)
    stalled_s, was_s = host.memory_stalled_s, before.latest.host.memory_stalled_s
    if limits.memory_pressure and stalled_s is not None and was_s is not None:
        part = (stalled_s - was_s) / span_s
        if part > limits.memory_pressure:
            yield (
                "memory_pressure",
                f"host memory: for {part:.0%} of the time all processes waited for memory "
                f"(more than {limits.memory_pressure:.0%})",
            )
    if limits.network_errors_per_s:
        rate = (host.network_errors - before.latest.host.network_errors) / span_s
        if rate > limits.network_errors_per_s:
            yield (
                "network_errors",
                f"network: {rate:.0f} errors and drops a second (more than {limits.network_errors_per_s:g})",
            )


def _gpu(
    gpu: GpuReading, limits: HealthOptions, first_errors: int, throttled_s: float
) -> Iterator[tuple[str, str]]:
    name = f"GPU {gpu.gpu}"
    if gpu.lost:
        if limits.gpu_lost:
            yield "gpu_lost", f"{name} is lost: {gpu.lost}"
        return
    errors = (gpu.uncorrected_errors or 0) - first_errors
    if limits.gpu_memory_errors and errors >= limits.gpu_memory_errors:
        yield "gpu_memory_errors", f"{name}: {errors} uncorrectable memory errors since the node started"
    xids = [xid for xid in gpu.xids if xid not in XIDS_OF_PROGRAMS]
    if limits.gpu_xid and xids:
        yield "gpu_xid", f"{name}: the driver reports Xid {', '.join(map(str, xids))} since the node started"
    taken, total = gpu.memory_taken_nbytes, gpu.memory_nbytes
    if limits.gpu_memory_taken and taken is not None and total and taken > limits.gpu_memory_taken * total:
        yield (
            "gpu_memory_taken",
            f"{name}: others took {_gib(taken)} of its {_gib(total)} since the pool was sized (more than "
            f"{limits.gpu_memory_taken:.0%}), and a large step may find no memory",
        )
    temperature, slowdown = gpu.temperature_celsius, gpu.slowdown_celsius
    if limits.gpu_temperature_margin and temperature is not None and slowdown is not None:
        most = slowdown - limits.gpu_temperature_margin
        if temperature >= most:
            yield (
                "gpu_temperature",
                f"{name} has {temperature:.0f} °C ({most:.0f} or more; it slows down at {slowdown:.0f})",
            )
    if limits.gpu_throttled_s and throttled_s > limits.gpu_throttled_s:
        why = ", ".join(throttle for throttle in gpu.throttles if throttle in HARDWARE_THROTTLES)
        yield (
            "gpu_throttled",
            f"{name} is slowed down by its hardware ({why}) for {throttled_s:.0f} s "
            f"(more than {limits.gpu_throttled_s:g})",
        )


def _disk(now: Readings, limits: HealthOptions) -> Iterator[tuple[str, str]]:
    disk = now.disk
    if disk is None:
        return
    if disk.free_nbytes is not None and disk.free_nbytes < limits.disk_free_nbytes:
        yield (
            "disk_space",
            f"disk: {_gib(disk.free_nbytes)} free at {disk.path} (less than {_gib(limits.disk_free_nbytes)})",
        )
    if not limits.disk_write_s:
        return
    if disk.error:
        yield "disk_latency", f"disk: a write to {disk.path} fails: {disk.error}"
    elif disk.write_s > limits.disk_write_s:
        yield (
            "disk_latency",
            f"disk: a page took {disk.write_s:.2f} s to be written to {disk.path} "
            f"(more than {limits.disk_write_s:g})",
        )


def _first_errors(before: Judgement, now: Readings) -> Mapping[str, int]:
    """Errors at the first reading: they occurred before this node started."""
    found = {gpu.gpu: gpu.uncorrected_errors for gpu in now.gpus if gpu.uncorrected_errors is not None}
    return {**found, **before.first_errors}


def _throttled_since(before: Judgement, now: Readings) -> Mapping[str, float]:
    return {
        gpu.gpu: before.throttled_since_s.get(gpu.gpu, now.now_s)
        for gpu in now.gpus
        if not set(HARDWARE_THROTTLES).isdisjoint(gpu.throttles)
    }


def _gib(nbytes: float) -> str:
    return f"{nbytes / 2**30:.2f} GiB"
