"""HTTP routes of the dashboard: its files, benchmark results and the live feed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson
from aiohttp import web

from moonpool.conductor.access.gate import PRINCIPAL
from moonpool.conductor.api.context import CONTEXT, ApiContext
from moonpool.conductor.api.errors import ApiError
from moonpool.conductor.api.models.lanes import Lanes
from moonpool.conductor.api.status_routes import reply
from moonpool.conductor.api.streams.stream_writer import StreamWriter
from moonpool.conductor.api.streams.streaming import SSE_HEADERS
from moonpool.conductor.dashboard.benchmark_results import BenchResults, ResultUnknown

STATIC = Path(__file__).parent / "static"

_FILES = frozenset(
    str(path.relative_to(STATIC)) for path in STATIC.rglob("*") if path.suffix in (".css", ".js", ".txt")
)
# The page always matches the serving version, and loads nothing from other hosts.
_PAGE_HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": (
        "default-src 'self'; img-src 'self' data:; form-action 'self'; "
        "frame-ancestors 'none'; base-uri 'none'"
    ),
}

EVERY_S = 1.0
# Snapshots take at most this part of a core, for all viewers together: of large clusters they come less
# often, but not less than that. With what sending them takes, a viewer costs less than 2 %.
_SHARE, _SLOWEST_S = 0.01, 5.0
_REQUESTS_SHOWN = 40


class LiveFeed:
    """One snapshot a second, or less often (``pause_s``), encoded once for all viewers of one scope
    (``Principal.scope``)."""

    def __init__(self, context: ApiContext, lanes: Lanes) -> None:
        self._context = context
        self._lanes = lanes
        self.ended = False
        self._viewers = 0
        self._latest: dict[str | None, asyncio.Future[bytes]] = {}
        self._made: dict[str | None, tuple[bytes, float]] = {}  # the last event, and until when it will do
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

    def first(self, scope: str | None) -> bytes:
        """The event for a viewer that comes: of now, unless the last one cost so much that it must do."""
        event, until_s = self._made.get(scope, (b"", 0.0))
        return event if time.monotonic() < until_s else self._make(scope)

    def _make(self, scope: str | None) -> bytes:
        began_s = time.thread_time()
        event = self.event(scope)
        lasts_s = pause_s(time.thread_time() - began_s)
        if lasts_s > EVERY_S:
            self._made[scope] = event, time.monotonic() + lasts_s
        return event

    async def next(self, scope: str | None) -> bytes:
        """The next event, whole; empty once the feed has ended."""
        if scope not in self._latest:
            self._latest[scope] = asyncio.get_running_loop().create_future()
        return await asyncio.shield(self._latest[scope])

    def end(self) -> None:
        """End the streams of all viewers at once. Idempotent."""
        self.ended = True
        waiting, self._latest = self._latest, {}
        for latest in waiting.values():
            latest.set_result(b"")

    def event(self, scope: str | None) -> bytes:
        """The cluster as it is now, or what one tenant may see of it, as one server-sent event."""
        snapshot = self._of_cluster() if scope is None else self._of_tenant(scope)
        latest = self._context.recent.latest(_REQUESTS_SHOWN, scope)
        snapshot["requests"] = [one.see(self._lanes.timeline).to_dict() for one in latest]
        return b"data: " + orjson.dumps(snapshot, default=str, option=orjson.OPT_NON_STR_KEYS) + b"\n\n"

    def _of_cluster(self) -> dict[str, Any]:
        context = self._context
        ready, degraded = self._lanes.ready()
        return {
            "unix_s": context.unix_clock(),
            "ready": ready and not context.leaving,
            "degraded": [*(["draining"] if context.leaving else []), *degraded],
            "cluster": self._lanes.cluster(),
            "metrics": context.metrics.snapshot(),
            **context.conductor.activity(),
        }

    def _of_tenant(self, tenant: str) -> dict[str, Any]:
        """Figures of the cluster tell what others send and have cached: a tenant gets its own counts."""
        context = self._context
        return {
            "unix_s": context.unix_clock(),
            "ready": self._lanes.ready()[0] and not context.leaving,
            "tenant": tenant,
            "model": context.conductor.model.name,
            **context.conductor.tenant_activity(tenant),
        }

    async def _run(self) -> None:
        spent_s = 0.0
        while self._viewers:
            await asyncio.sleep(pause_s(spent_s))
            began_s = time.thread_time()
            waiting, self._latest = self._latest, {}
            for scope, latest in waiting.items():
                try:
                    latest.set_result(self._make(scope))
                except Exception as error:
                    # Tells the viewers that their connections end: without it they would wait for ever.
                    latest.set_exception(error)
                    latest.exception()  # retrieved, should all have left
            spent_s = time.thread_time() - began_s
        self._made.clear()
        self._task = None


def pause_s(spent_s: float) -> float:
    """Seconds until the next snapshots, after some that took ``spent_s`` of a core."""
    return min(max(EVERY_S, spent_s / _SHARE), _SLOWEST_S)


FEED = web.AppKey("feed", LiveFeed)
RESULTS = web.AppKey("results", BenchResults)


async def dashboard(http: web.Request) -> web.FileResponse:
    """``GET /``"""
    return web.FileResponse(STATIC / "index.html", headers=_PAGE_HEADERS)


async def static(http: web.Request) -> web.FileResponse:
    """``GET /static/{name}``: scripts and styles of the dashboard."""
    name = http.match_info["name"]
    if name not in _FILES:
        raise web.HTTPNotFound
    return web.FileResponse(STATIC / name, headers=_PAGE_HEADERS)


async def benchmarks(http: web.Request) -> web.Response:
    """``GET /v1/benchmarks``: the result files, newest first."""
    return reply({"object": "list", "data": await asyncio.to_thread(http.app[RESULTS].listed)})


async def benchmark(http: web.Request) -> web.Response:
    """``GET /v1/benchmarks/{name}``: one file, as ``moonpool bench … --json`` wrote it."""
    try:
        return reply(await asyncio.to_thread(http.app[RESULTS].report, http.match_info["name"]))
    except ResultUnknown as error:
        raise ApiError(404, str(error), param="name", code="result_not_found") from error


async def live(http: web.Request) -> web.StreamResponse:
    """``GET /v1/live``: server-sent events, the first at once, then one a second, of large clusters fewer."""
    feed, scope = http.app[FEED], http[PRINCIPAL].scope
    response = web.StreamResponse(headers=SSE_HEADERS)
    context = http.app[CONTEXT]
    writer = StreamWriter(http, response, context.options.write_timeout_s, context.clock)
    with feed.watching(), writer:
        try:
            await response.prepare(http)
            await writer.write(feed.first(scope))
            while not feed.ended and context.gate.still_admits(http):
                await writer.write(await feed.next(scope))
        except ConnectionError:
            pass  # the page was closed
    return response
