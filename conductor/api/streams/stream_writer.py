"""Writes a stream, and ends it when its client does not read, so that it does not hold its place on nodes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from aiohttp import web

log = logging.getLogger(__name__)


class StreamWriter:
    """Writes to ``response``. Aborts the connection when a write has not returned for ``limit_s``.

    That ends the handler as if the client had closed the connection; ``stalled`` is True then.
    """

    def __init__(
        self,
        http: web.Request,
        response: web.StreamResponse,
        limit_s: float,
        clock: Callable[[], float],
    ) -> None:
        self.stalled = False
        self._http = http
        self._response = response
        self._limit_s = limit_s
        self._clock = clock
        # When the writes in progress began, one for each sequence; oldest first.
        self._began_s: dict[object, float] = {}
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> StreamWriter:
        self._look_in(self._limit_s)
        return self

    def __exit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()

    async def write(self, event: bytes) -> None:
        # Without a timer of its own: a stream has thousands of writes, and hardly one waits.
        self._began_s[key := object()] = self._clock()
        try:
            await self._response.write(event)
        finally:
            del self._began_s[key]

    def _look(self) -> None:
        now_s = self._clock()
        waited_s = now_s - next(iter(self._began_s.values()), now_s)
        if waited_s < self._limit_s:
            self._look_in(self._limit_s - waited_s)
            return
        self.stalled = True
        log.warning("the client has not read its stream for %.3g s: its request is ended", waited_s)
        if self._http.transport is not None:
            self._http.transport.abort()

    def _look_in(self, seconds: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(seconds, self._look)
