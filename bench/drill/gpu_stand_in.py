"""``python -m moonpool.bench.drill.gpu_stand_in``: a decode node that computes on the CPU, and believes that
it has a GPU. At SIGUSR2 the GPU falls off the bus: NVML reports it as lost, and steps fail as CUDA's do."""

from __future__ import annotations

import runpy
import signal
import sys
from collections.abc import Callable
from typing import Any

import pynvml

from moonpool.engine.device import selection
from moonpool.engine.device.device import CpuDevice, Launched
from moonpool.engine.node import node
from moonpool.runtime.health import gpu

_UUID = "GPU-stand-in"
_LOST = "CUDA error: unspecified launch failure"


class StandIn:
    """``pynvml`` with one GPU that answers nothing but that it is lost, once it is. What is not here is the
    binding's own, which says that it was not initialized: those figures are unknown."""

    def __init__(self) -> None:
        self.lost = False

    def __getattr__(self, name: str) -> Any:
        return getattr(pynvml, name)

    def nvmlInit(self) -> None:
        """There is no driver to open."""

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        return uuid

    def nvmlDeviceGetIndex(self, handle: str) -> int:
        return 0

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> None:
        if self.lost:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)


class StandInDevice(CpuDevice):
    """A CPU that is lost with the GPU."""

    def __init__(self, nvml: StandIn) -> None:
        self._nvml = nvml

    def run(self, step: Callable[[], Any]) -> Launched[Any]:
        self.check()
        return super().run(step)

    def check(self) -> None:
        if self._nvml.lost:
            raise RuntimeError(_LOST)


def install() -> StandIn:
    """Have health ask the stand-in, and engines compute on its device, in this process."""
    nvml = StandIn()
    vars(gpu)["pynvml"] = nvml
    vars(node)["gpu_uuids"] = lambda device: (_UUID,)
    vars(selection)["CpuDevice"] = lambda: StandInDevice(nvml)
    return nvml


if __name__ == "__main__":
    stand_in = install()
    signal.signal(signal.SIGUSR2, lambda *_: setattr(stand_in, "lost", True))
    sys.argv += ["--role", "decode"]
    runpy.run_module("moonpool.node", run_name="__main__", alter_sys=True)
