"""Comments on a stream that has nothing to say yet."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from aiohttp import web

from moonpool.runtime.service.vital import cancel_and_wait

# Proxies end connections that are silent for 30 to 60 s; clients show after a few that something happens.
EVERY_S = 2.0
HEARTBEAT = b": waiting\n\n"


class Heartbeats:
    """From its ``with`` until ``stop``, ``response`` gets a comment every ``EVERY_S``.

    The first comment sends the headers: an error until then still has its own status.
    """

    def __init__(self, http: web.Request, response: web.StreamResponse) -> None:
        self.response = response
        self._http = http
        self._stopped = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Heartbeats:
        self._task = asyncio.create_task(self._beat())
        return self

    async def __aexit__(self, *_: object) -> None:
        await cancel_and_wait(self._task)

    async def stop(self) -> None:
        """Write no more; returns when nothing is being written. Idempotent."""
        self._stopped.set()
        if self._task is not None and not self._task.done():
            await asyncio.wait({self._task})

    async def _beat(self) -> None:
        while True:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopped.wait(), EVERY_S)
                return
            try:
                if not self.response.prepared:
                    await self.response.prepare(self._http)
                await self.response.write(HEARTBEAT)
            except ConnectionError:
                return  # what is written next finds the same
