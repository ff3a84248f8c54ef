"""Checks of this machine for ``moonpool doctor``. They change nothing and take milliseconds."""

from __future__ import annotations

import ctypes
import resource
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

from moonpool.doctor.finding import Finding
from moonpool.errors import ExtraMissing, LocalClusterError, has_extra
from moonpool.local.node_configs import models_to_start, pools_nbytes
from moonpool.local.preflight import available_nbytes, check_memory, check_model, check_redis
from moonpool.local.redis_server import find_redis
from moonpool.runtime.config.model_directory import ModelMissing
from moonpool.runtime.config.options import Config
from moonpool.runtime.health.gpu import nvml_report, readings_of_this_machine
from moonpool.runtime.health.monitor import HealthMonitor
from moonpool.runtime.health.readings import HARDWARE_THROTTLES, GpuReading
from moonpool.runtime.machine.compiled_library import find_compiler
from moonpool.runtime.machine.processor import usable_cores
from moonpool.runtime.redaction import redacted


def check_machine(config: Config) -> Iterator[Finding]:
    """Yield the findings, each as soon as it is known; without the engine only what a store node needs."""
    yield Finding("python", "ok", f"{sys.version.split()[0]} at {sys.executable}")
    if has_extra("serve"):
        served = [one.config for one in models_to_start(config)]
        config = served[0]
        yield Finding("torch", "ok", version("torch"))
        yield from map(model, served)
        yield memory(*served)
        for check in _ENGINE_CHECKS:
            yield check(config)
        if not config.index.redis_url:  # else see ``configured_redis``
            yield redis(config)
    else:
        fact = "not installed; store nodes and clients run without it"
        yield Finding("engine", "ok", fact, str(ExtraMissing("`moonpool up`", "serve")))
    for check in _CHECKS:
        yield check(config)
    for gpu in readings_of_this_machine():
        yield gpu_health(gpu)


def gpu_health(gpu: GpuReading) -> Finding:
    name = f"GPU {gpu.gpu}"
    if gpu.lost:
        return Finding(name, "wrong", f"lost: {gpu.lost}", "see dmesg (Xid); nvidia-smi --gpu-reset")
    used, total = gpu.memory_used_nbytes, gpu.memory_nbytes
    facts = [
        f"{(total - used) / 2**30:.1f} of {total / 2**30:.1f} GiB free" if total and used is not None else "",
        f"{gpu.temperature_celsius:.0f} °C" if gpu.temperature_celsius is not None else "",
        f"{gpu.power_watts:.0f} W" if gpu.power_watts is not None else "",
        f"{gpu.uncorrected_errors} uncorrectable memory errors" if gpu.uncorrected_errors is not None else "",
        f"slowed down ({', '.join(gpu.throttles)})" if gpu.throttles else "",
    ]
    fact = ", ".join(filter(None, facts)) or "no figures from its driver"
    if gpu.uncorrected_errors:
        return Finding(name, "wrong", fact, "nvidia-smi -q -d ECC,ROW_REMAPPER; reset it before serving")
    if not set(HARDWARE_THROTTLES).isdisjoint(gpu.throttles):
        return Finding(name, "slow", fact, "check cooling and power supply")
    return Finding(name, "ok", fact)


def compiler(config: Config) -> Finding:
    if found := find_compiler():
        return Finding("compiler", "ok", found)
    return Finding("compiler", "slow", "no C++ compiler", "Debian, Ubuntu: apt install g++; then `make env`")


async def configured_redis(config: Config) -> Finding:
    """Whether the Redis at ``index.redis_url`` answers."""
    url = redacted(config.index.redis_url)
    try:
        await check_redis(config.index.redis_url)
    except LocalClusterError as error:
        return Finding("redis", "missing", url, str(error))
    return Finding("redis", "ok", f"{url} answers")


def redis(config: Config) -> Finding:
    try:
        binary = find_redis()
    except LocalClusterError as error:
        return Finding("redis", "missing", "no server binary", str(error))
    return Finding("redis", "ok", f"{binary.path}, from {binary.origin}")


def model(config: Config) -> Finding:
    directory = config.model.directory
    try:
        check_model(directory)
    except ModelMissing as error:
        return Finding("model", "missing", str(directory), str(error))
    nbytes = sum(file.stat().st_size for file in directory.glob("*.safetensors"))
    return Finding("model", "ok", f"{directory}, {nbytes / 2**20:.0f} MiB of weights")


def memory(*configs: Config) -> Finding:
    # Pools are anonymous or memfds: the size of /dev/shm does not limit them.
    nbytes = sum(map(pools_nbytes, configs))
    fact = f"{available_nbytes() / 2**30:.1f} GiB free, {nbytes / 2**30:.1f} GiB for pools"
    try:
        check_memory(*configs)
    except LocalClusterError as error:
        return Finding("memory", "missing", fact, str(error))
    return Finding("memory", "ok", fact)


def host_health(config: Config) -> Finding:
    """Take one reading of what could make a node here unhealthy (health.*). GPUs need NVML."""
    path = config.store.ssd.path
    # A node creates the directory if it is absent.
    limits = replace(config.health, bad_readings=1)
    monitor = HealthMonitor(limits, disk=path if path and Path(path).is_dir() else "")
    monitor.read()
    monitor.close()
    now, reasons = monitor.judgement.latest, monitor.judgement.reasons
    assert now is not None
    if reasons:
        advice = "see docs/troubleshooting.md, “A node is unhealthy”"
        return Finding("host health", "slow", "; ".join(reasons), advice)
    disk = f", a page is durable in {1e3 * now.disk.write_s:.1f} ms" if now.disk else ""
    return Finding("host health", "ok", f"within health.*{disk}; GPUs: {nvml_report()}")


def open_files(config: Config) -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < 4096:
        return Finding("open files", "slow", f"at most {soft} of {hard}", "ulimit -n 65536 before starting")
    return Finding("open files", "ok", f"at most {soft}")


def huge_pages(config: Config) -> Finding:
    switch = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not switch.exists():
        advice = "large pools are touched and copied slower"
        return Finding("huge pages", "slow", "not offered by this kernel", advice)
    chosen = switch.read_text().split("[")[1].split("]")[0]
    if chosen == "never":
        return Finding("huge pages", "slow", chosen, f"echo madvise > {switch}")
    return Finding("huge pages", "ok", chosen)


def threads(config: Config) -> Finding:
    cores = usable_cores()
    nodes = config.cluster.num_compute
    num_threads = config.engine.compute_threads(cores, max(1, nodes))
    fact = f"{cores} cores for {nodes} nodes of {num_threads} compute threads a rank"
    if nodes * num_threads > 2 * cores:
        advice = "the nodes share cores: fewer of them (--prefill 1 --decode 1) or engine.threads=1"
        return Finding("cores", "slow", fact, advice)
    return Finding("cores", "ok", fact)


def clock(config: Config) -> Finding:
    # struct timex begins with `modes`; all zero reads, and 5 (TIME_ERROR) means not synchronised.
    state = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(512)) if sys.platform == "linux" else 0
    if state == 5:
        advice = "deadlines between machines use wall clocks: run NTP (chrony) before adding machines"
        return Finding("clock", "slow", "not synchronised", advice)
    return Finding("clock", "ok", "synchronised")


def disk(config: Config) -> Finding:
    directory = tempfile.gettempdir()
    free = shutil.disk_usage(directory).free
    fact = f"{free / 2**30:.1f} GiB free in {directory}"
    if free < 64 << 20:
        advice = "logs and the Redis socket go there: free some space, or set TMPDIR"
        return Finding("disk", "missing", fact, advice)
    return Finding("disk", "ok", fact)


_Check = Callable[[Config], Finding]
_ENGINE_CHECKS: tuple[_Check, ...] = (compiler, threads)
_CHECKS: tuple[_Check, ...] = (host_health, open_files, huge_pages, clock, disk)
