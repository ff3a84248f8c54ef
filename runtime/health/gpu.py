"""Readings of GPUs through NVML, the driver's library."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from moonpool.runtime.health.readings import GpuReading

try:
    import pynvml
except ModuleNotFoundError:  # it comes with moonpool[serve]
    pynvml = None

T = TypeVar("T")

_NOT_INSTALLED = "NVML's Python binding is not installed: pip install 'moonpool[serve]'"
_THROTTLES = {
    "hw_slowdown": "nvmlClocksEventReasonHwSlowdown",
    "hw_thermal": "nvmlClocksEventReasonHwThermalSlowdown",
    "hw_power_brake": "nvmlClocksEventReasonHwPowerBrakeSlowdown",
    "sw_thermal": "nvmlClocksEventReasonSwThermalSlowdown",
    "sw_power_cap": "nvmlClocksEventReasonSwPowerCap",
}
_MAX_XIDS = 16  # of a GPU: after the first, more only repeat that it is broken


class GpuWatch:
    """Reads GPUs by their UUIDs. ``missing``: why some of them cannot be read; empty if all can.

    NVML is opened once a process and stays open.
    """

    def __init__(self, uuids: Sequence[str], reserved: Callable[[], int | None] = lambda: None) -> None:
        """``reserved``: bytes of a GPU's memory that this process has reserved; None: not known."""
        self.missing = ""
        self._reserved = reserved
        self._first_others: dict[str, int] = {}  # bytes of others at the first reading
        self._gpus: list[tuple[str, Any]] = []  # number, NVML's handle
        self._events: Any = None  # NVML's set of events, where the driver has events
        self._xids: dict[str, list[int]] = {}
        self._first_joules: dict[str, float] = {}
        if not uuids:
            return
        if pynvml is None:
            self.missing = f"the health of GPUs is unknown: {_NOT_INSTALLED}"
            return
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            self.missing = f"the health of GPUs is unknown: NVML reports {error}"
            return
        for uuid in uuids:
            try:
                handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
                self._gpus.append((str(pynvml.nvmlDeviceGetIndex(handle)), handle))
            except pynvml.NVMLError as error:
                self.missing = f"the health of GPU {uuid} is unknown: NVML reports {error}"
        try:
            self._events = pynvml.nvmlEventSetCreate()
            for _, handle in self._gpus:
                pynvml.nvmlDeviceRegisterEvents(handle, pynvml.nvmlEventTypeXidCriticalError, self._events)
        except pynvml.NVMLError as error:
            self.missing = self.missing or f"Xid errors of GPUs are unknown: NVML reports {error}"

    def read(self) -> tuple[GpuReading, ...]:
        """Take a reading, about a millisecond a GPU. Never raises for errors of a GPU or its driver."""
        self._take_xids()
        readings = []
        for number, handle in self._gpus:
            reading = replace(_read(number, handle), xids=tuple(self._xids.get(number, ())))
            if (joules := reading.energy_joules) is not None:
                first = self._first_joules.setdefault(number, joules)
                reading = replace(reading, energy_joules=joules - first)
            readings.append(self._with_taken(reading))
        return tuple(readings)

    def _with_taken(self, reading: GpuReading) -> GpuReading:
        used, own = reading.memory_used_nbytes, self._reserved()
        if used is None or own is None:
            return reading
        first = self._first_others.setdefault(reading.gpu, used - own)
        return replace(reading, memory_taken_nbytes=max(used - own - first, 0))

    def _take_xids(self) -> None:
        while self._events is not None:
            try:
                event = pynvml.nvmlEventSetWait_v2(self._events, 0)  # does not wait
                number = str(pynvml.nvmlDeviceGetIndex(event.device))
            except pynvml.NVMLError:  # none is left, or the GPU does not answer
                return
            known = self._xids.setdefault(number, [])
            if event.eventData not in known and len(known) < _MAX_XIDS:
                known.append(int(event.eventData))


def readings_of_this_machine() -> tuple[GpuReading, ...]:
    """One reading of every GPU; empty where NVML reports none, see ``nvml_report``."""
    if pynvml is None:
        return ()
    try:
        pynvml.nvmlInit()
        handles = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
        uuids = [pynvml.nvmlDeviceGetUUID(handle) for handle in handles]
    except pynvml.NVMLError:
        return ()
    return GpuWatch(uuids).read()


def nvml_report() -> str:
    """One line for people: whether the GPUs of this machine can be read."""
    if pynvml is None:
        return f"not watched, {_NOT_INSTALLED}"
    try:
        pynvml.nvmlInit()
        return f"{pynvml.nvmlDeviceGetCount()} watched, NVML {pynvml.nvmlSystemGetNVMLVersion()}"
    except pynvml.NVMLError as error:
        return f"not watched, NVML reports {error}"


class _GpuLost(Exception):
    pass


def _read(number: str, handle: Any) -> GpuReading:
    def ask(question: Callable[..., T], *arguments: Any) -> T | None:
        """The answer; None if this GPU or its driver does not support the question."""
        try:
            return question(handle, *arguments)
        except pynvml.NVMLError as error:
            if error.value in (pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_RESET_REQUIRED):
                raise _GpuLost(str(error)) from error
            return None

    def errors(kind: int) -> int | None:
        return ask(pynvml.nvmlDeviceGetTotalEccErrors, kind, pynvml.NVML_VOLATILE_ECC)

    try:
        busy = ask(pynvml.nvmlDeviceGetUtilizationRates)
        memory = ask(pynvml.nvmlDeviceGetMemoryInfo)
        power = ask(pynvml.nvmlDeviceGetPowerUsage)
        energy = ask(pynvml.nvmlDeviceGetTotalEnergyConsumption)  # millijoules since the driver started
        clock = ask(pynvml.nvmlDeviceGetClockInfo, pynvml.NVML_CLOCK_SM)
        reasons = ask(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons) or 0
        temperature = ask(pynvml.nvmlDeviceGetTemperature, pynvml.NVML_TEMPERATURE_GPU)
        return GpuReading(
            number,
            utilization=None if busy is None else busy.gpu / 100,
            memory_used_nbytes=None if memory is None else int(memory.used),
            memory_nbytes=None if memory is None else int(memory.total),
            temperature_celsius=temperature,
            slowdown_celsius=_slowdown(ask, temperature),
            power_watts=None if power is None else power / 1e3,
            clock_hertz=None if clock is None else clock * 1e6,
            corrected_errors=errors(pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED),
            uncorrected_errors=errors(pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED),
            throttles=tuple(name for name, bit in _THROTTLES.items() if reasons & getattr(pynvml, bit)),
            energy_joules=None if energy is None else energy / 1e3,
        )
    except _GpuLost as lost:
        return GpuReading(number, lost=str(lost))


def _slowdown(ask: Callable[..., Any], temperature: float | None) -> float | None:
    known: float | None = ask(
        pynvml.nvmlDeviceGetTemperatureThreshold, pynvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN
    )
    if known or temperature is None:
        return known
    # Newer GPUs only report the distance to it.
    margin: float | None = ask(pynvml.nvmlDeviceGetMarginTemperature)
    return None if margin is None else temperature + margin
