"""One replica of a node: a process that is started again when it ends, and killed when it is silent."""

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
from moonpool.runtime.service.crash_loop import MAX_SHORT_LIVES, SHORT_LIFE_S, ShortLives
from moonpool.runtime.service.heartbeat import BEATS_PER_TIMEOUT, until_silent

log = logging.getLogger(__name__)

# What a daemon's exit code says: see ``run_service``.
_WRONG_OPTIONS = 2


class ReplicaProcess:
    """``was_ready``: one of its processes has served; ``num_lives`` counts them."""

    def __init__(
        self, replica: Replica, create: Callable[[Replica], Child], options: ParallelOptions
    ) -> None:
        """``create`` gives the process of one life, not started; it says that it runs several times in
        ``options.timeout_s``."""
        self.number = replica.number
        self.was_ready = asyncio.Event()
        self.num_lives = 0
        self._replica = replica
        self._create = create
        self._options = options
        self._child: Child | None = None
        self._ends = False

    @property
    def facts(self) -> dict[str, Any]:
        """What its ready line said; empty while it does not serve."""
        return self._child.ready if self._child is not None and self._child.returncode is None else {}

    async def keep(self) -> None:
        """Start it, and start it again whenever it ends. Returns when it was told to drain and has.

        Raises:
            ConfigError: it refused its options.
            ChildFailed: it did not become ready the first time, its lives became too short, or it died while
                it drained. It is not running then.
        """
        lives = ShortLives()
        while True:
            self.num_lives += 1
            child = self._child = self._create(replace(self._replica, life=self.num_lives))
            await child.start()
            if self._ends:
                child.kill()
            lived_s = await self._follow(child)
            code = child.returncode or 0
            how = f"ended by signal {-code}" if code < 0 else f"ended with code {code}"
            if self._ends:
                if code and child.ready:
                    raise child.failure(f"{how} while it drained")
                return
            if not self.was_ready.is_set():
                if code == _WRONG_OPTIONS:
                    raise ConfigError(f"{child.name} refused its options, see above")
                raise child.failure(f"{how} before it was ready; its last lines above say why")
            if lives.too_many(lived_s):
                raise child.failure(
                    f"{how}, and {MAX_SHORT_LIVES} times in a row less than {SHORT_LIFE_S:g} s after it was "
                    "ready: starting it again does not mend it; its lines above say what is wrong"
                )
            log.error("%s %s: it is started again", child.name, how)

    def drain(self) -> None:
        """Let it finish what it has, and end; at once where it does not serve. Idempotent."""
        if self._ends:
            return
        self._ends = True
        if self._child is not None:
            if self._child.ready:
                self._child.terminate()
            else:
                self._child.kill()

    async def stop(self, timeout_s: float) -> None:
        """End it within ``timeout_s``, whatever it does. ``keep`` must not be running."""
        self._ends = True
        if self._child is not None:
            await self._child.stop(timeout_s)

    async def _follow(self, child: Child) -> float:
        """Until it ends, by itself or because it was silent; for how long it was ready, seconds."""
        began_s = time.monotonic()
        watch = asyncio.create_task(self._watch(child), name=f"heart of {child.name}")
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
        """Kill it once it is silent, as one is that is stopped: SIGTERM would not end that."""

        def bound_s() -> float:
            # What is imported and loaded may hold the interpreter for long, from a cold disk.
            return self._options.timeout_s if child.ready else self._options.start_timeout_s

        look_s = self._options.timeout_s / BEATS_PER_TIMEOUT
        await until_silent(lambda: child.num_heard, bound_s, look_s)
        if not self._ends:  # how long a drain takes is limited, too
            log.error("%s has been silent for %g s: it is killed", child.name, bound_s())
            child.kill()
