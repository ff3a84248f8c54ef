"""Readings of a real host, of a real disk that is full or hangs, and of a simulated GPU."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pynvml
import pytest
from prometheus_client import REGISTRY

from moonpool.doctor.machine import gpu_health
from moonpool.runtime.config.options import HealthOptions
from moonpool.runtime.health.gpu import GpuWatch, readings_of_this_machine
from moonpool.runtime.health.host import HostWatch, memory_limits, memory_stalled_s
from moonpool.runtime.health.monitor import HealthMonitor
from moonpool.runtime.health.readings import GpuReading
from tests.runtime.health.stand_in import UUID, gpu_stand_in


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A filesystem of 4 MiB."""
    mount = tmp_path / "disk"
    mount.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "none", str(mount)], check=False)
    if done.returncode:
        pytest.skip("needs the right to mount a file system; CI has it")
    yield mount
    subprocess.run(["umount", "-l", str(mount)], check=True)


def fast(**limits: object) -> HealthOptions:
    return HealthOptions(interval_s=60, bad_readings=1, good_readings=1, **limits)  # type: ignore[arg-type]


def test_host_reading_equals_psutil() -> None:
    reading = HostWatch().read()
    memory = psutil.virtual_memory()
    assert 0 < reading.memory_available_nbytes <= reading.memory_nbytes <= memory.total
    assert 0 <= reading.cpu_ratio <= 1
    assert 0 < reading.open_files < reading.max_files


def test_open_files_are_those_of_this_process(tmp_path: Path) -> None:
    watch = HostWatch()
    before = watch.read().open_files
    with (tmp_path / "one").open("w"), (tmp_path / "two").open("w"):
        assert watch.read().open_files == before + 2


def test_stalls_of_the_kernel(tmp_path: Path) -> None:
    path = tmp_path / "memory"
    assert memory_stalled_s(path) is None
    path.write_text(
        "some avg10=0.00 avg60=0.74 avg300=2.13 total=13629083\n"
        "full avg10=0.00 avg60=0.09 avg300=0.27 total=1993238\n"
    )
    assert memory_stalled_s(path) == 1.993238


@pytest.mark.parametrize(
    ("line", "folder", "files"),
    [
        ("0::/pod/x", "pod", ("memory.max", "memory.current", "inactive_file")),
        (
            "4:memory:/pod/x",
            "memory/pod",
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ),
    ],
)
def test_memory_limit_of_a_container(
    tmp_path: Path, line: str, folder: str, files: tuple[str, str, str]
) -> None:
    """The limit of a parent group counts; reclaimable cache does not count as used."""
    (tmp_path / "own").write_text(f"9:name=systemd:/\n{line}\n")
    group = tmp_path / folder
    group.mkdir(parents=True)
    (group / files[0]).write_text("1000000\n")
    (group / files[1]).write_text("700000\n")
    (group / "memory.stat").write_text(f"anon 1\n{files[2]} 50000\n")
    (limit,) = memory_limits(tmp_path, tmp_path / "own")
    assert limit.read() == (350_000, 1_000_000)
    (group / files[0]).write_text("max\n")
    assert memory_limits(tmp_path, tmp_path / "own") == []


def test_a_disk_that_fills_up_is_too_full_and_then_fails(small_disk: Path) -> None:
    monitor = HealthMonitor(fast(disk_free_nbytes=1 << 20), disk=str(small_disk / "blocks"))
    monitor.read()
    assert monitor.judgement.healthy
    (small_disk / "other").write_bytes(bytes(3 << 20) + bytes(500 << 10))
    began_s = time.monotonic()
    while monitor.judgement.healthy:  # on a busy machine the first look at the full disk ends later
        monitor.read()
        assert time.monotonic() < began_s + 60
    assert tuple(monitor.judgement.problems) == ("disk_space",)
    monitor.close()


def test_a_reading_that_fails_is_counted_and_others_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    def count() -> float:
        labels = {"class": "worker", "cause": "error"}
        return REGISTRY.get_sample_value("moonpool_failures_total", labels) or 0.0

    monitor = HealthMonitor(HealthOptions(interval_s=0.01))
    before, broken = count(), HostWatch.read
    monitor.start()
    monkeypatch.setattr(HostWatch, "read", lambda self: 1 / 0)
    began_s = time.monotonic()
    while count() < before + 2:
        assert time.monotonic() < began_s + 60
        time.sleep(0.01)
    monkeypatch.setattr(HostWatch, "read", broken)
    failed = monitor.judgement
    while monitor.judgement is failed:
        assert time.monotonic() < began_s + 60
        time.sleep(0.01)
    monitor.close()


def test_hanging_write_counts_so_far(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hangs = threading.Event()
    monkeypatch.setattr(os, "fdatasync", lambda fd: hangs.wait(90))
    monitor = HealthMonitor(fast(disk_write_s=0.2), disk=str(tmp_path))
    began_s = time.monotonic()
    while monitor.judgement.healthy:
        monitor.read()
        assert time.monotonic() < began_s + 60
    assert "to be written" in monitor.judgement.reasons[0]
    hangs.set()
    while not monitor.judgement.healthy:
        monitor.read()
        assert time.monotonic() < began_s + 60
    assert monitor._disk is not None and monitor._disk._thread is not None
    monitor._disk._thread.join(60)  # a write that hangs now is the busy disk's, and would be abandoned
    monitor.close()
    assert list(tmp_path.iterdir()) == []


def test_missing_nvml_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pynvml, "CDLL", lambda name: (_ for _ in ()).throw(OSError(name)))
    monkeypatch.setattr(pynvml, "nvmlLib", None)
    watch = GpuWatch([UUID])
    assert watch.read() == ()
    assert "NVML reports" in watch.missing
    assert GpuWatch([]).missing == ""


def test_gpu_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    state = gpu_stand_in(monkeypatch)
    state.reasons = 0x8 | 0x40 | 0x4  # slowed down by hardware, by heat, and by the power cap
    watch = GpuWatch([UUID, "GPU-another"])
    assert "GPU-another" in watch.missing
    (gpu,) = watch.read()
    assert (gpu.gpu, gpu.utilization, gpu.temperature_celsius, gpu.slowdown_celsius) == ("3", 0.4, 50, 90)
    assert (gpu.memory_used_nbytes, gpu.power_watts, gpu.clock_hertz) == (8 << 30, 300.0, 1.98e9)
    assert gpu.throttles == ("hw_slowdown", "hw_thermal", "sw_power_cap")
    state.no_slowdown, state.margin = 1, 12
    assert watch.read()[0].slowdown_celsius == 62


def test_a_gpu_that_falls_off_the_bus_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    state = gpu_stand_in(monkeypatch)
    monitor = HealthMonitor(fast(), gpus=[UUID])
    monitor.read()
    assert monitor.judgement.healthy
    state.lost = 1
    monitor.read()
    assert monitor.judgement.fatal
    assert monitor.judgement.reasons == ("GPU 3 is lost: GPU is lost",)


def test_the_doctor_says_a_line_of_each_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    state = gpu_stand_in(monkeypatch)
    (gpu,) = readings_of_this_machine()
    well = gpu_health(gpu)
    assert (well.what, well.state) == ("GPU 3", "ok")
    assert well.fact == "72.0 of 80.0 GiB free, 50 °C, 300 W, 0 uncorrectable memory errors"
    state.reasons, state.uncorrected = 0x40, 0
    assert gpu_health(readings_of_this_machine()[0]).state == "slow"
    state.uncorrected = 2
    assert "2 uncorrectable" in gpu_health(readings_of_this_machine()[0]).fact
    assert gpu_health(readings_of_this_machine()[0]).state == "wrong"
    assert gpu_health(GpuReading("3", lost="GPU is lost")).state == "wrong"


def test_memory_that_others_take_is_what_the_pool_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    state, own = gpu_stand_in(monkeypatch), [6 << 30]
    monitor = HealthMonitor(fast(), gpus=[UUID], reserved=lambda: own[0])

    def taken() -> tuple[float | None, bool]:
        monitor.read()
        (gpu,) = monitor.readings()["gpus"]
        return gpu["memory_taken_nbytes"], monitor.judgement.healthy

    assert taken() == (0, True), "what others had before the pool was sized is known"
    own[0], state.used = 10 << 30, 12 << 30
    assert taken() == (0, True), "its own growth"
    state.used = 15 << 30
    assert taken() == (3 << 30, True)
    state.used = 17 << 30
    assert taken() == (5 << 30, False)
    assert monitor.judgement.reasons == (
        "GPU 3: others took 5.00 GiB of its 80.00 GiB since the pool was sized (more than 5%), and a large "
        "step may find no memory",
    )
    monitor.start()
    try:
        assert REGISTRY.get_sample_value("moonpool_gpu_memory_taken_bytes", {"gpu": "3"}) == 5 << 30
    finally:
        monitor.close()
    assert not GpuWatch([UUID]).read()[0].memory_taken_nbytes, "without the allocator nothing is said"


def test_xids_end_a_node_that_no_program_caused(monkeypatch: pytest.MonkeyPatch) -> None:
    state = gpu_stand_in(monkeypatch)
    monitor = HealthMonitor(fast(), gpus=[UUID])
    for xid in (31, 31, 79):
        state.xid = xid
        monitor.read()
        assert monitor.judgement.fatal == (xid == 79)
    monitor.read()
    assert monitor.judgement.reasons == ("GPU 3: the driver reports Xid 79 since the node started",)
    assert monitor.judgement.latest is not None
    assert monitor.judgement.latest.gpus[0].xids == (31, 79)


def test_readings_on_the_metrics_page(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    state = gpu_stand_in(monkeypatch)
    state.celsius = 89
    monitor = HealthMonitor(fast(), gpus=[UUID], disk=str(tmp_path))
    monitor.start()
    try:
        assert monitor.state("ready") == "unhealthy"
        assert monitor.state("draining") == "draining"
        assert monitor.changed()
        assert not monitor.changed()
        values = {
            "moonpool_node_health": ({"check": "gpu_temperature"}, 0.0),
            "moonpool_gpu_temperature_celsius": ({"gpu": "3"}, 89.0),
            "moonpool_gpu_memory_bytes": ({"gpu": "3", "state": "used"}, float(8 << 30)),
            "moonpool_gpu_memory_errors_total": ({"gpu": "3", "kind": "uncorrected"}, 0.0),
            "moonpool_gpu_throttled": ({"gpu": "3", "reason": "hw_thermal"}, 0.0),
        }
        for name, (labels, value) in values.items():
            assert REGISTRY.get_sample_value(name, labels) == value
        assert REGISTRY.get_sample_value("moonpool_node_health", {"check": "host_memory"}) == 1.0
        assert REGISTRY.get_sample_value("moonpool_host_disk_write_seconds", {}) is not None
        assert monitor.readings()["gpus"][0]["temperature_celsius"] == 89
    finally:
        monitor.close()
    assert REGISTRY.get_sample_value("moonpool_node_health", {"check": "host_memory"}) is None
