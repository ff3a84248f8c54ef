"""The dashboard of large clusters: what a viewer costs the conductor, and what a snapshot costs the page."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from functools import partial
from statistics import median
from time import perf_counter
from urllib.parse import urlsplit

from moonpool.bench.conductor.decisions import Settings
from moonpool.bench.conductor.frames import BrowserMissing, frame_times
from moonpool.bench.conductor.overhead import CONCURRENCY, DELAY_S, ask, cluster
from moonpool.bench.harness.child import Child
from moonpool.bench.harness.command import Run
from moonpool.bench.harness.turns import spread, turns
from moonpool.bench.serve.client.http_client import HttpClient
from moonpool.runtime.reports.report import Row

# How long viewers watch clusters of so many nodes: of large ones a snapshot comes every five seconds.
_WATCHED_S = {64: 6.0, 1024: 30.0}
_VIEWERS = 8
_REQUESTS = 400  # before: lists, routes and counters have something to show


async def dashboard_rows(run: Run, settings: Settings) -> AsyncIterator[Row]:
    """The cost of the first viewer, of each one more, and of a snapshot in Chromium, by view.

    Measured between requests, after enough of them: under load the difference is smaller than its spread, and
    a snapshot costs the same.
    """
    for num_nodes, watched_s in _WATCHED_S.items():
        if num_nodes > min(_WATCHED_S) and not settings.full:
            return
        async with (
            cluster(DELAY_S, num_nodes // 2, num_nodes // 2) as (url, conductor),
            HttpClient(url) as client,
        ):
            await client.warm(CONCURRENCY)
            await ask(client, _REQUESTS, 2)
            case = f"dashboard, {num_nodes} nodes"
            rows = await _viewer_rows(run, case, url, conductor, watched_s / (3 if run.quick else 1))
            for row in (*rows, *await _frame_rows(run, case, url)):
                yield row


async def _viewer_rows(run: Run, case: str, url: str, conductor: Child, watched_s: float) -> list[Row]:
    async def fraction(viewers: int) -> float:
        cpu_s, began_s = conductor.cpu_s(), perf_counter()
        seen = await asyncio.gather(*(_watch(url, watched_s) for _ in range(viewers)))
        if not viewers:
            await asyncio.sleep(watched_s)
        assert all(len(one) >= 2 for one in seen), "a viewer saw too few snapshots"
        return (conductor.cpu_s() - cpu_s) / (perf_counter() - began_s)

    contestants = {count: partial(fraction, count) for count in (0, 1, _VIEWERS)}
    fractions = await turns(contestants, run.rounds, warm_up=0)
    without = 100 * median(fractions[0])
    rows = []
    for count, metric in (
        (1, "a viewer's share of a core"),
        (_VIEWERS, f"each of {_VIEWERS} viewers' share of a core"),
    ):
        # Of the same round: what else the conductor does changes with time.
        pairs = zip(fractions[count], fractions[0], strict=True)
        shares = [100 * (taken - idle) / count for taken, idle in pairs]
        rows.append(Row(case, metric, median(shares), "%", samples=shares))
    return [*rows, Row(case, "the conductor's without", without, "%")]


async def _frame_rows(run: Run, case: str, url: str) -> list[Row]:
    snapshots = await _watch(url, 60.0, most=3)
    try:
        times = await frame_times(url, snapshots, 5 if run.quick else 20)
    except BrowserMissing as error:
        run.say(f"frames are left out: {error}")
        return []
    return [
        spread(f"{case}, {view}", "main thread a frame", seconds, "ms", 1e3)
        for view, seconds in times.items()
    ]


async def _watch(url: str, seconds: float, most: int = 1 << 30) -> list[str]:
    """View the dashboard; returns the snapshots that came, at most ``most``, as JSON."""
    parts, snapshots = urlsplit(url), list[str]()
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port, limit=1 << 24)
    writer.write(f"GET /v1/live HTTP/1.1\r\nHost: {parts.netloc}\r\n\r\n".encode())
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            async for line in reader:
                if line.startswith(b"data: "):
                    snapshots.append(line.removeprefix(b"data: ").decode())
                if len(snapshots) == most:
                    break
    writer.close()
    return snapshots
