"""Decisions on the health of a node: faults, recovery, hysteresis."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.runtime.config.options import HealthOptions
from moonpool.runtime.health.judge import CHECKS, FATAL, XIDS_OF_PROGRAMS, Judgement, judge
from moonpool.runtime.health.readings import DiskReading, GpuReading, HostReading, Readings

LIMITS = HealthOptions(bad_readings=3, good_readings=5)
HOST = HostReading(8 << 30, 16 << 30, 0.1, 0, 0, open_files=40, max_files=1024, memory_stalled_s=0.0)
DISK = DiskReading("/ssd", 100 << 30, 0.001)
GPU = GpuReading(
    "0",
    utilization=0.5,
    memory_nbytes=80 << 30,
    memory_taken_nbytes=3 << 30,
    temperature_celsius=60,
    slowdown_celsius=90,
    corrected_errors=7,
    uncorrected_errors=2,
)
WELL = Readings(0.0, HOST, DISK, (GPU,))
SWITCHED_OFF = HealthOptions(
    gpu_lost=False,
    gpu_memory_errors=0,
    gpu_xid=False,
    gpu_memory_taken=0,
    gpu_temperature_margin=0,
    gpu_throttled_s=0,
    host_memory_free=0,
    memory_pressure=0,
    open_files_free=0,
    disk_free_nbytes=0,
    disk_write_s=0,
    network_errors_per_s=0,
)


def after(count: int, now: Readings, before: Judgement, limits: HealthOptions = LIMITS) -> Judgement:
    """``count`` more such readings, 5 seconds apart, with the error counts and stalls of ``now``."""
    start_s = before.latest.now_s if before.latest else 0.0
    for number in range(1, count + 1):
        host = replace(
            now.host,
            network_errors=now.host.network_errors * number,
            memory_stalled_s=(now.host.memory_stalled_s or 0.0) * number,
        )
        before = judge(before, replace(now, now_s=start_s + 5 * number, host=host), limits)
    return before


def well(limits: HealthOptions = LIMITS) -> Judgement:
    return after(3, WELL, Judgement(), limits)


FAULTS = {
    "gpu_lost": replace(WELL, gpus=(GpuReading("0", lost="GPU is lost"),)),
    "gpu_memory_errors": replace(WELL, gpus=(replace(GPU, uncorrected_errors=3),)),
    "gpu_xid": replace(WELL, gpus=(replace(GPU, xids=(31, 79)),)),
    "gpu_memory_taken": replace(WELL, gpus=(replace(GPU, memory_taken_nbytes=5 << 30),)),
    "gpu_temperature": replace(WELL, gpus=(replace(GPU, temperature_celsius=88),)),
    "gpu_throttled": replace(WELL, gpus=(replace(GPU, throttles=("hw_thermal",)),)),
    "host_memory": replace(WELL, host=replace(HOST, memory_available_nbytes=100 << 20)),
    "memory_pressure": replace(WELL, host=replace(HOST, memory_stalled_s=2.0)),
    "open_files": replace(WELL, host=replace(HOST, open_files=1000)),
    "disk_space": replace(WELL, disk=replace(DISK, free_nbytes=1 << 20)),
    "disk_latency": replace(WELL, disk=replace(DISK, write_s=3.0)),
    "network_errors": replace(WELL, host=replace(HOST, network_errors=2000)),
}


def test_every_check_has_a_fault() -> None:
    assert tuple(FAULTS) == CHECKS
    assert well().healthy


@pytest.mark.parametrize("check", CHECKS)
def test_lasting_fault_makes_a_node_unhealthy(check: str) -> None:
    # Throttling counts from the first reading that shows it, for 30 s; then come three readings as of all.
    needed = 3 + (7 if check == "gpu_throttled" else 0)
    assert after(needed - 1, FAULTS[check], well()).healthy
    ill = after(needed, FAULTS[check], well())
    assert tuple(ill.problems) == (check,)
    assert any(figure.isdigit() for figure in ill.problems[check])
    assert ill.reasons == (ill.problems[check],)
    assert ill.fatal == (check in FATAL)


@pytest.mark.parametrize("check", CHECKS)
def test_a_limit_of_zero_switches_a_check_off(check: str) -> None:
    assert after(20, FAULTS[check], well(SWITCHED_OFF), SWITCHED_OFF).healthy


@pytest.mark.parametrize("check", sorted(set(CHECKS) - FATAL))
def test_node_recovers_after_good_readings(check: str) -> None:
    ill = after(12, FAULTS[check], well())
    assert not ill.healthy
    assert not after(LIMITS.good_readings - 1, WELL, ill).healthy
    assert after(LIMITS.good_readings, WELL, ill).healthy


def test_errors_from_before_the_start_are_not_counted() -> None:
    assert after(10, WELL, Judgement()).healthy


def test_failed_write_reports_the_error() -> None:
    full = replace(WELL, disk=replace(DISK, error="No space left on device"))
    assert "No space left on device" in after(3, full, well()).reasons[0]


def test_errors_of_programs_are_no_fault_of_the_gpu() -> None:
    reported = replace(WELL, gpus=(replace(GPU, xids=tuple(XIDS_OF_PROGRAMS)),))
    assert after(50, reported, well()).healthy


def test_software_power_cap_is_no_fault() -> None:
    assert after(50, replace(WELL, gpus=(replace(GPU, throttles=("sw_power_cap",)),)), well()).healthy


@given(st.lists(st.sampled_from([WELL, FAULTS["host_memory"]]), max_size=60))
def test_a_value_at_its_limit_does_not_flap(readings: list[Readings]) -> None:
    """Between two changes there are at least as many readings in a row as configured."""
    held, changes = Judgement(), 0
    for number, reading in enumerate(readings):
        was = held.healthy
        held = judge(held, replace(reading, now_s=5.0 * number), LIMITS)
        if held.healthy != was:
            changes += 1
            needed = LIMITS.good_readings if held.healthy else LIMITS.bad_readings
            latest = readings[number + 1 - needed : number + 1]
            assert latest == [WELL if held.healthy else FAULTS["host_memory"]] * needed
    assert changes <= len(readings) // LIMITS.bad_readings
