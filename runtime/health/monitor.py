"""Looks at a host and its GPUs now and then, from a thread, and keeps what is held of them."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from prometheus_client import REGISTRY

from moonpool.runtime.config.options import HealthOptions
from moonpool.runtime.errors import MoonpoolError
from moonpool.runtime.health.collector import HealthCollector
from moonpool.runtime.health.disk import DiskWatch
from moonpool.runtime.health.gpu import GpuWatch
from moonpool.runtime.health.host import HostWatch
from moonpool.runtime.health.judge import Judgement, judge
from moonpool.runtime.health.readings import Readings

log = logging.getLogger(__name__)


class NodeUnfit(MoonpoolError):
    """A GPU of this node computes no more, or wrongly. What ran has ended; the node must not be started on
    it again before somebody has looked at it."""

    code = "UNAVAILABLE"

    def __init__(self, node_id: str, reasons: Sequence[str]) -> None:
        super().__init__(
            f"node {node_id} has drained and ends: {'; '.join(reasons)}. Reset the GPU "
            "(nvidia-smi --gpu-reset) or take it out, and look at the driver's log (dmesg, Xid)"
        )


class HealthMonitor:
    """``judgement`` is of the latest reading; a new object every time, so that any thread may look.

    ``start`` reads once and returns; then a thread of its own reads every ``health.interval_s``.
    """

    def __init__(
        self,
        options: HealthOptions,
        *,
        gpus: Sequence[str] = (),
        disk: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``gpus``: UUIDs of those the node computes on; ``disk``: where it keeps blocks, if anywhere."""
        self.judgement = Judgement()
        self._options = options
        self._gpus = GpuWatch(gpus if options.interval_s else ())
        self._disk = DiskWatch(Path(disk)) if disk else None
        self._host = HostWatch()
        self._clock = clock
        self._announced: frozenset[str] = frozenset()
        self._end = threading.Event()
        self._thread: threading.Thread | None = None
        self._collector: HealthCollector | None = None

    def start(self) -> None:
        if self._gpus.missing:
            log.warning("%s", self._gpus.missing)
        if self._options.interval_s:
            self.read()
            self._collector = HealthCollector(lambda: self.judgement)
            self._thread = threading.Thread(target=self._run, name="health", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Idempotent. A driver or disk that hangs is not waited for."""
        self._end.set()
        if self._thread is not None:
            self._thread.join(0.5)
        if self._collector is not None:
            REGISTRY.unregister(self._collector)
        if self._disk is not None:
            self._disk.close()
        self._thread = self._collector = None

    def state(self, state: str) -> str:
        """What a node whose life has come to ``state`` says of itself."""
        return "unhealthy" if state == "ready" and not self.judgement.healthy else state

    def changed(self) -> bool:
        """Whether other checks fail than when this was last asked; logs it."""
        judgement = self.judgement
        failing = frozenset(judgement.problems)
        if failing == self._announced:
            return False
        self._announced = failing
        if failing:
            log.error("this node is unhealthy: %s", "; ".join(judgement.reasons))
        else:
            log.info("this node is healthy again")
        return True

    def readings(self) -> dict[str, Any]:
        """The latest figures as the cluster is told them, by names that end in their unit; few and short."""
        now = self.judgement.latest
        if now is None:
            return {}
        figures: dict[str, Any] = {
            "memory_available_nbytes": now.host.memory_available_nbytes,
            "cpu_ratio": round(now.host.cpu_ratio, 2),
        }
        if now.disk is not None:
            figures |= {"disk_free_nbytes": now.disk.free_nbytes, "disk_write_s": round(now.disk.write_s, 4)}
        if now.gpus:
            figures["gpus"] = [
                {
                    "gpu": gpu.gpu,
                    "utilization": gpu.utilization,
                    "temperature_celsius": gpu.temperature_celsius,
                    "power_watts": gpu.power_watts,
                    "throttles": list(gpu.throttles),
                }
                for gpu in now.gpus
            ]
        return figures

    def read(self) -> None:
        """Look now."""
        disk = self._disk.read() if self._disk is not None else None
        now = Readings(self._clock(), self._host.read(), disk, self._gpus.read())
        self.judgement = judge(self.judgement, now, self._options)

    def _run(self) -> None:
        while not self._end.wait(self._options.interval_s):
            try:
                self.read()
            except Exception:  # whatever a host says, its node serves on
                log.exception("the host's health could not be read")
