"""What one look at a host and its GPUs found. Counts are since the machine or the driver started."""

from __future__ import annotations

from dataclasses import dataclass

HARDWARE_THROTTLES = ("hw_slowdown", "hw_thermal", "hw_power_brake")
THROTTLES = (*HARDWARE_THROTTLES, "sw_thermal", "sw_power_cap")


@dataclass(frozen=True, slots=True)
class GpuReading:
    """None: the driver does not tell. ``lost``: why it answers no more, and then nothing else is known."""

    gpu: str  # its number as the driver counts
    lost: str = ""
    utilization: float | None = None  # 0 to 1
    memory_used_nbytes: int | None = None
    memory_nbytes: int | None = None
    temperature_celsius: float | None = None
    slowdown_celsius: float | None = None  # where the hardware slows itself down
    power_watts: float | None = None
    clock_hertz: float | None = None
    corrected_errors: int | None = None
    uncorrected_errors: int | None = None
    throttles: tuple[str, ...] = ()  # of THROTTLES, those in force


@dataclass(frozen=True, slots=True)
class DiskReading:
    """Of the disk that blocks are kept on. ``error``: what it answered instead of writing."""

    path: str
    free_nbytes: int | None  # None: it has not answered yet
    nbytes: int
    write_s: float  # a page written and made durable; of a write that has not ended: for how long by now
    error: str = ""


@dataclass(frozen=True, slots=True)
class HostReading:
    """Memory is what processes here may use: the machine's, or less in a container."""

    memory_available_nbytes: int
    memory_nbytes: int
    cpu_ratio: float  # of all cores, since the reading before
    network_nbytes: int  # both ways, all interfaces but the loopback
    network_errors: int  # and packets dropped


@dataclass(frozen=True, slots=True)
class Readings:
    """``now_s`` is of a monotonic clock. ``disk`` is None where no blocks go to one."""

    now_s: float
    host: HostReading
    disk: DiskReading | None = None
    gpus: tuple[GpuReading, ...] = ()
