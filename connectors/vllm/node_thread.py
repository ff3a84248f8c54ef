"""The thread in which the engine's store node runs, and is started again if it fails."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from moonpool.connectors.errors import NodeFailed
from moonpool.connectors.service_thread import ServiceThread
from moonpool.connectors.vllm.engine_node import EngineNode
from moonpool.runtime.service.lifecycle import ServiceContext
from moonpool.runtime.service.vital import VITAL, cancel_and_wait

log = logging.getLogger(__name__)

Result = TypeVar("Result")

# Longest that saves and loads may take once the engine ends.
_LAST_CALLS_S = 3.0


class _Life(ServiceContext):
    """Of a node that is a part of another process."""

    def __init__(self, on_ready: Callable[[], None]) -> None:
        super().__init__("engine")
        self._on_ready = on_ready

    def ready(self, **facts: object) -> None:
        where = facts["node_id"], facts["rpc_address"], facts["metrics_url"]
        log.info("keeps KV blocks as node %s at %s; its metrics: %s", *where)
        self._on_ready()


class NodeThread:
    """Runs an ``EngineNode`` in a thread. If it fails it is started again later, and calls fail meanwhile."""

    def __init__(self, make: Callable[[], EngineNode]) -> None:
        self._make = make
        self._node: EngineNode | None = None
        self._calls: set[asyncio.Task[Any]] = set()
        self._started = threading.Event()  # ready, or failed once
        self._thread = ServiceThread("KV store", self._live)

    def wait_started(self, timeout_s: float) -> None:
        """Wait until the node runs or its first start has failed."""
        self._started.wait(timeout_s)

    def submit(self, call: Callable[[EngineNode], Coroutine[Any, Any, Result]]) -> Future[Result] | None:
        """Run a call of the node; None: it does not run. The call is cancelled if the node fails."""
        node = self._node
        if node is None:
            return None

        async def run() -> Result:
            task = asyncio.current_task()
            assert task is not None
            self._calls.add(task)
            try:
                return await call(node)
            finally:
                self._calls.discard(task)

        return asyncio.run_coroutine_threadsafe(run(), self._thread.loop)

    def close(self) -> None:
        """End the node: it leaves the index, and writes to disk what is only in memory."""
        self._thread.close()

    async def _live(self, ending: asyncio.Event) -> None:
        """Run one node until it fails, is drained, or this ends. Raises its error."""
        node = self._make()

        def on_ready() -> None:
            self._node = node
            self._started.set()

        life = _Life(on_ready)
        running = asyncio.ensure_future(node.run(life))
        told = asyncio.ensure_future(ending.wait())

        def on_error(loop: asyncio.AbstractEventLoop, facts: dict[str, Any]) -> None:
            loop.default_exception_handler(facts)
            if facts.get(VITAL):
                running.cancel()

        asyncio.get_running_loop().set_exception_handler(on_error)
        await asyncio.wait((running, told), return_when=asyncio.FIRST_COMPLETED)
        self._node = None
        if not running.done():
            # Saves that have begun are kept.
            await self._end_calls(_LAST_CALLS_S)
            life.draining.set()
            await asyncio.wait((running,))
        await self._end_calls(0)
        told.cancel()
        self._started.set()
        if running.cancelled():
            raise NodeFailed("a background task of the KV store ended; its error is above")
        running.result()

    async def _end_calls(self, within_s: float) -> None:
        if self._calls:
            await asyncio.wait(set(self._calls), timeout=within_s)
        await cancel_and_wait(*self._calls)
