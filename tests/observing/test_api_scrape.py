"""A scrape of /metrics takes next to nothing of the loop that streams tokens, however large the page is."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Awaitable, Iterator
from statistics import median
from typing import Any

import pytest
from aiohttp.test_utils import make_mocked_request

from moonpool.conductor.api import status_routes as pages
from moonpool.conductor.server import create_app
from moonpool.runtime.service.lifecycle import SWITCH_INTERVAL_S

TENANTS = 100
SCRAPES = 9
LOOP_S = 5e-3  # the most of the loop's time that a scrape may take


@pytest.fixture
def _switching() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_INTERVAL_S)  # as run_service does
    yield
    sys.setswitchinterval(before)


@pytest.fixture
def large(api: Any) -> Any:
    """An API that has counted requests of many tenants."""
    for i in range(TENANTS):
        for status in ("stop", "length", "cancelled"):
            tokens = {"prompt": 10, "cached": 5, "output": 7}
            api.context.metrics.of_tenant(f"tenant-{i}", status, tokens)
    return api


def request_for(api: Any) -> Any:
    return make_mocked_request("GET", "/metrics", app=create_app(api.context))


@pytest.mark.alone
async def test_the_loop_itself_works_little(large: Any) -> None:
    spent = []
    for _ in range(SCRAPES):
        request = request_for(large)
        began_s = time.thread_time()
        response = await pages.metrics(request)
        spent.append(time.thread_time() - began_s)
    assert len(response.body) > 50_000
    print(f"{len(response.body)} bytes, {1e3 * median(spent):.2f} ms of the loop")
    assert median(spent) < LOOP_S, spent


async def longest_stop_s(beside: Awaitable[object]) -> float:
    """Of a loop that is busy with nothing else."""
    stops: list[float] = []

    async def tick() -> None:
        last_s = time.perf_counter()
        while True:
            await asyncio.sleep(0)
            now_s = time.perf_counter()
            stops.append(now_s - last_s)
            last_s = now_s

    ticking = asyncio.create_task(tick())
    await beside
    ticking.cancel()
    return max(stops)


def count_for(seconds: float) -> None:
    until_s = time.perf_counter() + seconds
    while time.perf_counter() < until_s:
        pass


@pytest.mark.alone
@pytest.mark.usefixtures("_switching")
async def test_streams_go_on_while_a_page_is_rendered(large: Any) -> None:
    """The thread that renders holds the interpreter, but no longer at a time than one that only counts: what
    is left is what the machine does to two threads."""
    scraped, counted = [], []
    for _ in range(SCRAPES):
        began_s = time.perf_counter()
        scraped.append(await longest_stop_s(pages.metrics(request_for(large))))
        counting = asyncio.to_thread(count_for, time.perf_counter() - began_s)
        counted.append(await longest_stop_s(counting))
    print(f"longest stop {1e3 * median(scraped):.2f} ms, counting {1e3 * median(counted):.2f} ms")
    assert median(scraped) < max(LOOP_S, 3 * median(counted)), (scraped, counted)
