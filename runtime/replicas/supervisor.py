"""One replica of a node: a process that is restarted when it ends and killed when it is silent."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from moonpool.runtime.config.options import ParallelOptions
from moonpool.runtime.errors import ChildFailed, ConfigError
from moonpool.runtime.replicas.identity import Replica
from moonpool.runtime.service.child import Child
from moonpool.runtime.service.crash_loop import MAX_SHORT_RUNS, MIN_UPTIME_S, CrashLoop
from moonpool.runtime.service.heartbeat import BEATS_PER_TIMEOUT, until_silent
from moonpool.runtime.service.vital import vital

log = logging.getLogger(__name__)

# Exit code of a daemon with a wrong configuration: see ``run_service``.
_WRONG_OPTIONS = 2


class ReplicaProcess:
    """A supervised process. ``was_ready``: set once one of its ``num_starts`` processes has served."""

    def __init__(
        self, replica: Replica, create: Callable[[Replica], Child], options: ParallelOptions
    ) -> None:
        """``create`` makes the process of one run, not started, with ``BEATS_PER_TIMEOUT`` heartbeats in
        ``options.timeout_s``."""
        self.number = replica.number
        self.was_ready = asyncio.Event()
        self.num_starts = 0
        self._replica = replica
        self._create = create
        self._options = options
        self._child: Child | None = None
        self._ends = False

    @property
    def facts(self) -> dict[str, Any]:
        """The content of its ready line; empty while it does not serve."""
        return self._child.ready if self._child is not None and self._child.returncode is None else {}

    async def supervise(self) -> None:
        """Start the process, and restart it whenever it ends, until it has drained.

        Raises:
            ConfigError: the process rejected its options.
            ChildFailed: it did not become ready the first time, failed ``MAX_SHORT_RUNS`` times in a row, or
                failed while it drained. It is not running then.
        """
        crashes = CrashLoop()
        while True:
            self.num_starts += 1
            child = self._child = self._create(replace(self._replica, start_number=self.num_starts))
            await child.start()
            if self._ends:
                child.kill()
            uptime_s = await self._follow(child)
            code = child.returncode or 0
            how = f"ended by signal {-code}" if code < 0 else f"ended with code {code}"
            if self._ends:
                if code and child.ready:
                    raise child.failure(f"{how} while it drained")
                return
            if not self.was_ready.is_set():
                if code == _WRONG_OPTIONS:
                    raise ConfigError(f"{child.name} rejected its options; its log lines above say why")
                raise child.failure(f"{how} before it was ready; its log lines above say why")
            if crashes.gives_up(uptime_s):
                raise child.failure(
                    f"{how} {MAX_SHORT_RUNS} times in a row within {MIN_UPTIME_S:g} s of getting ready and "
                    "is not restarted; its log lines above say why"
                )
            log.error("%s %s and is restarted", child.name, how)

    def drain(self) -> None:
        """Let it finish its requests and end; kill it if it does not serve yet. Idempotent."""
        if self._ends:
            return
        self._ends = True
        if self._child is not None:
            if self._child.ready:
                self._child.terminate()
            else:
                self._child.kill()

    async def stop(self, timeout_s: float) -> None:
        """End it within ``timeout_s``. ``supervise`` must not be running."""
        self._ends = True
        if self._child is not None:
            await self._child.stop(timeout_s)

    async def _follow(self, child: Child) -> float:
        """Wait until the process ends or is killed for silence; return how long it was ready, in seconds."""
        began_s = time.monotonic()
        watch = vital(self._watch(child), f"heartbeat of {child.name}")
        try:
            await child.wait_ready()
            ready_s = time.monotonic()
            if self.was_ready.is_set():
                log.info("%s serves again %.2f s after its start", child.name, ready_s - began_s)
            self.was_ready.set()
            await child.wait()
            return time.monotonic() - ready_s
        except ChildFailed:
            await child.wait()
            return 0.0
        finally:
            watch.cancel()

    async def _watch(self, child: Child) -> None:
        """Kill the process when its heartbeat stops; a process stopped by SIGSTOP ignores SIGTERM."""

        def bound_s() -> float:
            # Imports and loading may hold the GIL for long when the disk is cold.
            return self._options.timeout_s if child.ready else self._options.start_timeout_s

        look_s = self._options.timeout_s / BEATS_PER_TIMEOUT
        await until_silent(lambda: child.num_messages, bound_s, look_s)
        if not self._ends:  # the duration of a drain has its own limit
            log.error("%s has been silent for %g s and is killed", child.name, bound_s())
            child.kill()
