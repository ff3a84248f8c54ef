"""HTTP routes of the dashboard: its files, benchmark results and the live feed."""

from __future__ import annotations

import asyncio
from pathlib import Path

from aiohttp import web

from moonpool.conductor.api.context import CONTEXT
from moonpool.conductor.api.errors import ApiError
from moonpool.conductor.api.exchange import SSE_HEADERS
from moonpool.conductor.api.status_routes import reply
from moonpool.conductor.dashboard.benchmark_results import BenchResults, ResultUnknown
from moonpool.conductor.dashboard.live_feed import LiveFeed

STATIC = Path(__file__).parent / "static"

_FILES = frozenset(
    str(path.relative_to(STATIC)) for path in STATIC.rglob("*") if path.suffix in (".css", ".js", ".txt")
)
# The page always matches the serving version, and loads nothing from other hosts.
_PAGE_HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data:",
}

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
    """``GET /v1/live``: server-sent events, the first at once, then one a second."""
    feed = http.app[FEED]
    response = web.StreamResponse(headers=SSE_HEADERS)
    with feed.watching():
        try:
            await response.prepare(http)
            await response.write(feed.event())
            while not http.app[CONTEXT].draining:
                await response.write(await feed.next())
        except ConnectionError:
            pass  # the page was closed
    return response
