"""Observers that are broken or slow: requests do not notice a collector that hangs, a full disk under the
lines of usage, or pages that do not read."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from time import perf_counter
from urllib.parse import urlsplit

import aiohttp
import psutil
import pytest

from moonpool.local.cluster import LocalCluster
from moonpool.runtime.config.options import Config
from moonpool.runtime.reports.comparison import interval
from moonpool.runtime.service.vital import cancel_and_wait
from tests.cluster.conftest import small_config
from tests.cluster.test_tracing import collecting
from tests.small_disk import mounted

pytestmark = pytest.mark.slow

NUM_REQUESTS, NUM_VIEWERS, AT_A_TIME = 24, 16, 4
ROUNDS = 8
SLOWER = 0.05
PROMPTS = [f"{number} In the beginning God created the heaven " * 4 for number in range(4)]


@asynccontextmanager
async def silent_collector() -> AsyncIterator[str]:
    """It takes connections, and never answers on them."""
    writers = []
    server = await asyncio.start_server(lambda _, writer: writers.append(writer), "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        assert writers, "nobody sent it a span"
    finally:
        server.close()
        for writer in writers:
            writer.transport.abort()


@asynccontextmanager
async def viewers(url: str, *, read: bool) -> AsyncIterator[None]:
    """Pages of the dashboard. Without ``read`` they read nothing of what they asked for."""
    at, writers, reading = urlsplit(url), [], []
    for _ in range(NUM_VIEWERS):
        reader, writer = await asyncio.open_connection(at.hostname, at.port, limit=1 << 20 if read else 1)
        writer.write(f"GET /v1/live HTTP/1.1\r\nHost: {at.netloc}\r\n\r\n".encode())
        writers.append(writer)
        if read:
            reading.append(asyncio.create_task(reader.read()))
    try:
        yield
    finally:
        await cancel_and_wait(*reading)
        for writer in writers:
            writer.transport.abort()


def fill(disk: Path) -> None:
    with contextlib.suppress(OSError), (disk / "other").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(1 << 16))


def cpu_s(cluster: LocalCluster) -> float:
    """Of its processes so far: other work of the machine does not count."""
    times = [psutil.Process(child.pid).cpu_times() for child in cluster.children.values()]
    return sum(one.user + one.system for one in times)


async def answers(url: str) -> tuple[list[str], float]:
    """The texts of all prompts, several times and traced, and the median seconds of a request."""
    taken: list[float] = []
    turns = asyncio.Semaphore(AT_A_TIME)

    async def ask(session: aiohttp.ClientSession, number: int) -> str:
        body = {"prompt": PROMPTS[number % len(PROMPTS)], "max_tokens": 16, "temperature": 0}
        headers = {"traceparent": f"00-{number + 1:032x}-{1:016x}-01"}
        async with turns:
            began_s = perf_counter()
            async with session.post(f"{url}/v1/completions", json=body, headers=headers) as answer:
                assert answer.status == 200, await answer.text()
                text = json.loads(await answer.read())["choices"][0]["text"]
            taken.append(perf_counter() - began_s)
        return str(text)

    async with aiohttp.ClientSession() as session:
        texts = await asyncio.gather(*(ask(session, number) for number in range(NUM_REQUESTS)))
    return list(texts), median(taken)


async def test_requests_do_not_notice_observers_that_are_broken(tmp_path: Path) -> None:
    """Three clusters at once: without observers, with such that work, and with broken ones. The load goes to
    all in turn. What working observers cost is told, and not judged here."""
    config = small_config()
    config = replace(config, cluster=replace(config.cluster, prefill=1, decode=1))

    def observed(directory: Path, collector: str) -> Config:
        audit = replace(config.audit, path=str(directory))
        return replace(config, audit=audit, tracing=replace(config.tracing, otlp_endpoint=collector))

    (tmp_path / "room").mkdir()
    with mounted(tmp_path, "1m") as disk:
        async with (
            silent_collector() as silent,
            collecting() as (collector, address),
            LocalCluster(config) as plain,
            LocalCluster(observed(tmp_path / "room", address)) as working,
            LocalCluster(observed(disk, silent)) as broken,
        ):
            clusters = (plain, working, broken)
            expected, _ = await answers(plain.url)
            for cluster in (working, broken):
                texts, _ = await answers(cluster.url)
                assert texts == expected
            fill(disk)
            taken: list[list[float]] = [[], [], []]
            spent: list[list[float]] = [[], [], []]
            async with viewers(working.url, read=True), viewers(broken.url, read=False):
                for number in range(ROUNDS):
                    for which in (0, 1, 2)[:: 1 if number % 2 else -1]:
                        before_s = cpu_s(clusters[which])
                        texts, median_s = await answers(clusters[which].url)
                        assert texts == expected
                        taken[which].append(median_s)
                        spent[which].append((cpu_s(clusters[which]) - before_s) / NUM_REQUESTS)
            assert collector.spans
            children = [child for cluster in clusters for child in cluster.children.values()]
        # They end by themselves, although spans and lines are left that nobody takes.
        codes = {child.name: child.returncode for child in children if child.name != "redis"}
    for what, seconds in (("median request", taken), ("CPU of all processes, a request", spent)):
        low, high = interval(seconds[1], seconds[2], confidence=0.95)
        plain_ms, working_ms, broken_ms = (1e3 * median(one) for one in seconds)
        print(
            f"{what}: {plain_ms:.1f} ms, with observers {working_ms:.1f} ms, with broken ones "
            f"{broken_ms:.1f} ms: between {low:.3f} and {high:.3f} times"
        )
        assert low <= 1 + SLOWER
    assert set(codes.values()) == {0}, codes
