"""Readings of a host and its GPUs. Counts are since the start of the machine or the driver."""

from __future__ import annotations

from dataclasses import dataclass

HARDWARE_THROTTLES = ("hw_slowdown", "hw_thermal", "hw_power_brake")
THROTTLES = (*HARDWARE_THROTTLES, "sw_thermal", "sw_power_cap")


@dataclass(frozen=True, slots=True)
class GpuReading:
    """A reading of a GPU; None: not reported. ``lost``: why it does not answer; then all else is None."""

    gpu: str  # its number in the driver
    lost: str = ""
    utilization: float | None = None  # 0 to 1
    memory_used_nbytes: int | None = None
    memory_nbytes: int | None = None
    # In use beyond what this process has reserved, and grown since its first reading: its pool does not know.
    memory_taken_nbytes: int | None = None
    temperature_celsius: float | None = None
    slowdown_celsius: float | None = None  # the temperature where the hardware slows down
    power_watts: float | None = None
    clock_hertz: float | None = None
    corrected_errors: int | None = None
    uncorrected_errors: int | None = None
    throttles: tuple[str, ...] = ()  # those of THROTTLES that are active
    xids: tuple[int, ...] = ()  # numbers of the driver's error reports since the node started, each once
    energy_joules: float | None = None  # since the first reading of this process

    @property
    def memory_free_nbytes(self) -> int | None:
        if self.memory_nbytes is None or self.memory_used_nbytes is None:
            return None
        return self.memory_nbytes - self.memory_used_nbytes


@dataclass(frozen=True, slots=True)
class DiskReading:
    """A reading of the disk for blocks. ``error``: the error of the last write."""

    path: str
    free_nbytes: int | None  # None before its first answer
    write_s: float  # duration of a durable write of a page, so far if it has not ended
    error: str = ""


@dataclass(frozen=True, slots=True)
class HostReading:
    """A reading of the host. Memory is that of the machine, or of the container if that is less."""

    memory_available_nbytes: int
    memory_nbytes: int
    cpu_ratio: float  # of all cores, since the previous reading
    network_nbytes: int  # sent and received, all interfaces but the loopback
    network_errors: int  # errors and dropped packets
    open_files: int  # file descriptors of this process
    max_files: int
    memory_stalled_s: float | None = None  # in which all processes waited for memory; None: not reported
    energy_joules: float | None = None  # of the processors, since this process started; None: not available


@dataclass(frozen=True, slots=True)
class Readings:
    """``now_s``: monotonic clock. ``disk`` is None without an SSD tier."""

    now_s: float
    host: HostReading
    disk: DiskReading | None = None
    gpus: tuple[GpuReading, ...] = ()
