"""Threads of the connector that may fail: the engine serves on, and says so once a minute."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

import uvloop

log = logging.getLogger(__name__)

# Work that ended for an error is started again this much later.
RESTART_S = 60.0
_SAY_EVERY_S = 60.0


class ServiceThread:
    """Runs ``live(ending)`` on an event loop of its own until ``close`` sets ``ending``.

    If it raises, whatever it is, that is logged, and it is started again ``RESTART_S`` later.
    """

    def __init__(self, name: str, live: Callable[[asyncio.Event], Coroutine[Any, Any, None]]) -> None:
        self.loop = uvloop.new_event_loop()
        self._name = name
        self._live = live
        self._ending = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name=f"moonpool-{name}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Idempotent."""
        if self._thread.is_alive():
            self.loop.call_soon_threadsafe(self._ending.set)
            self._thread.join()

    def _run(self) -> None:
        _share_all_cores()
        with asyncio.Runner(loop_factory=lambda: self.loop) as runner:
            runner.run(self._repeat())

    async def _repeat(self) -> None:
        while not self._ending.is_set():
            try:
                await self._live(self._ending)
            except Exception:
                # Whatever it is: the engine must serve on without a cache.
                name = self._name
                log.exception("the %s of this engine failed; it is started again in %g s", name, RESTART_S)
            ending = asyncio.ensure_future(self._ending.wait())
            await asyncio.wait((ending,), timeout=RESTART_S)
            ending.cancel()


def _share_all_cores() -> None:
    """Let this thread, and those it starts, run on all cores of the process that started this one.

    vLLM's CPU workers pin their main thread, from which threads inherit, to the core of their first compute
    thread. There it polls, and threads of ours were seen to wait for seconds for their turn.
    """
    cores = os.sched_getaffinity(os.getppid())
    if cores > os.sched_getaffinity(0):
        os.sched_setaffinity(0, cores)


class OnceAMinute:
    """Warnings of one kind, of which there may be many."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._said_s = float("-inf")
        self._num_silent = 0

    def say(self, what: str) -> None:
        """Log it, or only count it if the last line is less than a minute old."""
        if self._clock() - self._said_s < _SAY_EVERY_S:
            self._num_silent += 1
            return
        self._said_s = self._clock()
        log.warning("%s (%d more like this since the last line)", what, self._num_silent)
        self._num_silent = 0
