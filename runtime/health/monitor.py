"""Periodic readings of a host and its GPUs on a thread, and the resulting health of the node."""

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
from moonpool.runtime.failures import FailureClass
from moonpool.runtime.health.collector import HealthCollector
from moonpool.runtime.health.disk import DiskWatch
from moonpool.runtime.health.gpu import GpuWatch
from moonpool.runtime.health.host import HostWatch
from moonpool.runtime.health.judge import Judgement, judge
from moonpool.runtime.health.readings import Readings
from moonpool.runtime.observing import failures

log = logging.getLogger(__name__)


# What the node's record has of a ``GpuReading``.
_OF_GPU = (
    *("gpu", "utilization", "memory_free_nbytes", "memory_taken_nbytes", "temperature_celsius"),
    *("power_watts", "energy_joules", "throttles"),
)


class NodeUnfit(MoonpoolError):
    """A GPU of this node is lost or computes wrongly. All requests have ended.

    The node must not be started on this GPU again before a person has looked at it.
    """

    code = "UNAVAILABLE"
    failure = FailureClass.NODE

    def __init__(self, node_id: str, reasons: Sequence[str]) -> None:
        super().__init__(
            f"node {node_id} has drained and ends: {'; '.join(reasons)}. Reset the GPU "
            "(nvidia-smi --gpu-reset) or remove it, and see the driver's log (dmesg, Xid)"
        )


class HealthMonitor:
    """``judgement`` is that of the latest reading: an immutable object that any thread may read.

    ``start`` takes a reading and returns; a thread takes the next ones every ``health.interval_s``.
    """

    def __init__(
        self,
        options: HealthOptions,
        *,
        gpus: Sequence[str] = (),
        disk: str = "",
        reserved: Callable[[], int | None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``gpus``: UUIDs of the node's GPUs; ``disk``: its directory for blocks, if any. ``reserved``: see
        ``GpuWatch``."""
        self.judgement = Judgement()
        self._options = options
        self._gpus = GpuWatch(gpus if options.interval_s else (), reserved)
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
        """Stop. Does not wait for a driver or disk that hangs. Idempotent."""
        self._end.set()
        if self._thread is not None:
            self._thread.join(0.5)
        if self._collector is not None:
            REGISTRY.unregister(self._collector)
        if self._disk is not None:
            self._disk.close()
        self._thread = self._collector = None

    def state(self, state: str) -> str:
        """``state``, or unhealthy in place of ready."""
        return "unhealthy" if state == "ready" and not self.judgement.healthy else state

    def changed(self) -> bool:
        """Whether the failing checks have changed since the last call; logs the change."""
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
        """The latest figures for the node's record in the index; names end in their unit."""
        now = self.judgement.latest
        if now is None:
            return {}
        figures: dict[str, Any] = {
            "memory_available_nbytes": now.host.memory_available_nbytes,
            "cpu_ratio": round(now.host.cpu_ratio, 2),
            "energy_joules": now.host.energy_joules,
        }
        if now.disk is not None:
            figures |= {"disk_free_nbytes": now.disk.free_nbytes, "disk_write_s": round(now.disk.write_s, 4)}
        if now.gpus:
            figures["gpus"] = [{name: getattr(gpu, name) for name in _OF_GPU} for gpu in now.gpus]
        return figures

    def read(self) -> None:
        """Take a reading."""
        disk = self._disk.read() if self._disk is not None else None
        now = Readings(self._clock(), self._host.read(), disk, self._gpus.read())
        self.judgement = judge(self.judgement, now, self._options)

    def _run(self) -> None:
        while not self._end.wait(self._options.interval_s):
            try:
                self.read()
            except Exception:  # the node serves on, by its latest judgement
                log.exception("the host's health could not be read")
                failures.count(FailureClass.WORKER, "error")
