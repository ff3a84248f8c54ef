"""The store's client on a thread of its own, for the threads in which SGLang moves pages."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from contextlib import ExitStack, aclosing
from typing import Any, TypeVar

from moonpool.connectors.errors import StoreAway
from moonpool.connectors.service_thread import ServiceThread
from moonpool.connectors.sglang.settings import Settings
from moonpool.kvstore.client import StoreClient, open_client
from moonpool.kvstore.client.connections import IndexDirectory
from moonpool.kvstore.client.errors import NoNodeAnswered, NoRecords, NoStoreNodes, OutcomeUnknown
from moonpool.kvstore.errors import IndexUnavailable
from moonpool.kvstore.tiers.protocols import Bytes

Result = TypeVar("Result")

# After these the store is not asked for a moment: each call would take as long again.
_AWAY = (IndexUnavailable, NoNodeAnswered, NoRecords, NoStoreNodes, OutcomeUnknown, TimeoutError)
_LEAST_PAUSE_S = 1.0
_START_S = 10.0


class StoreThread:
    """Threads may share it. Close it; calls under way end with an error then."""

    def __init__(self, settings: Settings, clock: Callable[[], float] = time.monotonic) -> None:
        self._settings = settings
        self._clock = clock
        self._memory: list[Bytes] = []
        self._registered = ExitStack()
        self._client: StoreClient | None = None
        self._paused_until_s = float("-inf")
        self._started = threading.Event()  # runs, or failed once
        self._closing = False
        self._submitting = threading.Lock()
        self._thread = ServiceThread("store client", self._live)
        self._started.wait(_START_S)

    def register(self, memory: Bytes) -> None:
        """Make ``memory`` known to the transfer, until ``close``: parts of it are moved without a copy."""

        async def register() -> None:
            self._memory.append(memory)
            # Otherwise the next client does it.
            if self._client is not None:
                self._registered.enter_context(self._client.registered(memory))

        self._run(register)

    def call(
        self, make: Callable[[StoreClient], Coroutine[Any, Any, Result]], deadline_s: float | None = None
    ) -> Result:
        """Run a call of the client; it ends within ``deadline_s``, by default ``transfer.deadline_s``.

        Raises ``StoreAway``: not asked, because a call failed a moment ago; what the client raises;
        ``TimeoutError``. After any of them no memory of ours is read or written any more.
        """

        within_s = self._settings.config.transfer.deadline_s if deadline_s is None else deadline_s

        async def bounded() -> Result:
            client = self._client
            if client is None:
                raise StoreAway("the store's client does not run: the log says why")
            # A cancelled transfer has ended when this raises.
            async with asyncio.timeout(within_s):
                return await make(client)

        if (left_s := self._paused_until_s - self._clock()) > 0:
            raise StoreAway(f"the store did not answer; it is asked again in {left_s:.1f} s")
        began_s = self._clock()
        try:
            return self._run(bounded)
        except _AWAY:
            # At most half of the time is spent on calls that fail, but for long ones.
            now_s, longest_s = self._clock(), self._settings.config.transfer.deadline_s
            self._paused_until_s = now_s + max(_LEAST_PAUSE_S, min(now_s - began_s, longest_s))
            raise

    def _run(self, make: Callable[[], Coroutine[Any, Any, Result]]) -> Result:
        """Run it on the thread's loop. Raises ``StoreAway``: it is closed."""
        with self._submitting:
            if self._closing:
                raise StoreAway("the store's client is closed")
            future = asyncio.run_coroutine_threadsafe(make(), self._thread.loop)
        return future.result()

    async def _live(self, ending: asyncio.Event) -> None:
        config = self._settings.config
        try:
            async with (
                aclosing(IndexDirectory(config.index.redis_url, config.index.namespace)) as directory,
                open_client(
                    directory,
                    config.index.redis_url,
                    tenant=self._settings.tenant,
                    deadline_s=config.transfer.deadline_s,
                    transfer=config.transfer,
                ) as client,
            ):
                with self._registered:
                    for memory in self._memory:
                        self._registered.enter_context(client.registered(memory))
                    self._client = client
                    self._started.set()
                    await ending.wait()
                    self._client = None
        finally:
            self._client = None
            self._started.set()

    def close(self) -> None:
        """Idempotent."""
        with self._submitting:
            self._closing = True
        self._thread.close()
