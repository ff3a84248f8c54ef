"""Snapshots for open dashboards, once a second; none are computed without viewers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import orjson

from moonpool.conductor.api.context import ApiContext

EVERY_S = 1.0
_REQUESTS_SHOWN = 40


class LiveFeed:
    """One snapshot a second, encoded once for all viewers."""

    def __init__(self, context: ApiContext) -> None:
        self._context = context
        self._viewers = 0
        self._latest: asyncio.Future[bytes] | None = None
        self._task: asyncio.Task[None] | None = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        self._viewers += 1
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="live feed")
        try:
            yield
        finally:
            self._viewers -= 1

    async def next(self) -> bytes:
        """The next event, whole."""
        if self._latest is None:
            self._latest = asyncio.get_running_loop().create_future()
        return await asyncio.shield(self._latest)

    def event(self) -> bytes:
        """The cluster as it is now, as one server-sent event."""
        context = self._context
        ready, degraded = context.conductor.ready()
        snapshot = {
            "unix_s": context.unix_clock(),
            "ready": ready and not context.draining,
            "degraded": [*(["draining"] if context.draining else []), *degraded],
            "cluster": context.conductor.cluster(),
            "metrics": context.metrics.snapshot(),
            "requests": [record.to_dict() for record in context.recent.latest(_REQUESTS_SHOWN)],
            **context.conductor.activity(),
        }
        return b"data: " + orjson.dumps(snapshot, default=str, option=orjson.OPT_NON_STR_KEYS) + b"\n\n"

    async def _run(self) -> None:
        while self._viewers:
            await asyncio.sleep(EVERY_S)
            waiting, self._latest = self._latest, None
            if waiting is not None:
                waiting.set_result(self.event())
        self._task = None
