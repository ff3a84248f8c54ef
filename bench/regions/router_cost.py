"""What a router and the mirror of a cell's conductor cost: decisions, memory, and requests passed on."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from time import thread_time
from typing import Any, Final

import aiohttp
import psutil
from aiohttp import web

from moonpool.bench.harness.command import Run
from moonpool.bench.harness.services import daemon
from moonpool.bench.harness.turns import each, percentiles
from moonpool.bench.regions.cells import CellSettings
from moonpool.conductor.cells.choice import Cell, RegionCells
from moonpool.conductor.cells.prefixes import HotPrefixes, prefix_digests
from moonpool.kvstore.blocks.tier import Tier
from moonpool.kvstore.index.block_map import BlockMap
from moonpool.runtime.reports.report import Row

_DECISIONS, _QUICK_DECISIONS = 20_000, 500
_MIRROR_BLOCKS, _QUICK_BLOCKS = 10_000_000, 100_000
_CHAIN: Final = 128
_SYSTEM_CHARS, _QUESTION_CHARS = 4000, 800
_REQUESTS, _AT_ONCE, _EVENTS = 400, 16, 200
# A router's process: what it imports and knows, before it has connections.
_ROUTER = """
import psutil, random
import moonpool.conductor.cells.__main__
from moonpool.conductor.cells.choice import Cell, RegionCells
cells = [Cell(f"c{one}", hot={random.getrandbits(64): 1.0 for _ in range(64)}) for one in range(%d)]
region = RegionCells("", cells)
print(psutil.Process().memory_info().rss)
"""


def decision_rows(run: Run, settings: CellSettings) -> Iterator[Row]:
    """CPU to hash a chat of some 5,000 characters and to choose its cell; and to count it at a conductor."""
    rng = random.Random(settings.seed)
    systems = [rng.randbytes(_SYSTEM_CHARS // 2).hex() for _ in range(200)]
    hot = HotPrefixes(lambda: 0.0)
    cells = [
        Cell(f"cell-{one}", usable=True, num_nodes=settings.num_nodes, requests_per_s=1e4)
        for one in range(settings.num_cells)
    ]
    for number, system in enumerate(systems[:64]):
        digest = prefix_digests(_chat(system, "x"), "")[0]
        for cell in cells:
            cell.hot = {**cell.hot, digest: 1e4 / (number + 1)}
    region = RegionCells("", cells)
    hash_s, choose_s, count_s = list[float](), list[float](), list[float]()
    for _ in range(_QUICK_DECISIONS if run.quick else _DECISIONS):
        body = _chat(rng.choice(systems), rng.randbytes(_QUESTION_CHARS // 2).hex())
        times = [thread_time()]
        digests = prefix_digests(body, "")
        times.append(thread_time())
        region.order(digests)
        times.append(thread_time())
        hot.count(digests)
        times.append(thread_time())
        for taken, before, after in zip((hash_s, choose_s, count_s), times, times[1:], strict=False):
            taken.append(after - before)
    case = f"a chat of {_SYSTEM_CHARS + _QUESTION_CHARS:,} characters, {settings.num_cells} cells"
    for name, taken in (("hash its prefixes", hash_s), ("choose a cell", choose_s), ("count it", count_s)):
        found = percentiles(taken, 1e6)
        yield Row(case, f"CPU to {name}", found["p50"], "µs", **found)


def memory_rows(run: Run, settings: CellSettings) -> Iterator[Row]:
    """Of a router's process, and of the mirror of a cell's conductor."""
    run.say("memory")
    done = subprocess.run(
        [sys.executable, "-c", _ROUTER % settings.num_cells], capture_output=True, text=True, check=True
    )
    yield Row(f"a router of {settings.num_cells} cells", "memory of its process", int(done.stdout), "bytes")
    process, rng, blocks = psutil.Process(), random.Random(settings.seed), BlockMap()
    names = [f"node-{one}" for one in range(settings.num_nodes)]
    for name in names:
        blocks.join(name)
    before, number = process.memory_info().rss, _QUICK_BLOCKS if run.quick else _MIRROR_BLOCKS
    for _ in range(number // _CHAIN):
        blocks.store(rng.choice(names), rng.randbytes(16 * _CHAIN), Tier.POOL)
    held = process.memory_info().rss - before
    case = f"a mirror of {settings.num_nodes:,} nodes, {number:,} blocks"
    yield Row(case, "memory", held, "bytes")
    yield Row(case, "memory of a block", held / number, "bytes")


async def http_rows(run: Run, settings: CellSettings) -> AsyncIterator[Row]:
    """CPU of a router's process for requests and events that it passes on, from a cell in this process."""
    async with (
        _stand_in() as url,
        daemon("moonpool.conductor.cells", _sets(url)) as router,
        aiohttp.ClientSession(router.ready["url"]) as session,
    ):
        await _ready(session)
        number = _REQUESTS // (10 if run.quick else 1)
        case = f"HTTP, {_AT_ONCE} at a time"
        for name, body in (("answers", _chat("s" * _SYSTEM_CHARS, "q")), ("streams", None)):
            sent = body or _chat("s" * _SYSTEM_CHARS, "q") | {"stream": True}
            await _send(session, sent, number // 4)
            before_s = router.cpu_s()
            await _send(session, sent, number)
            cpu_ms = (router.cpu_s() - before_s) / number * 1e3
            yield Row(case, f"CPU of a request, {name}", cpu_ms, "ms")
        yield Row(case, "events of a stream", _EVENTS, "events")


def _chat(system: str, question: str) -> dict[str, Any]:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    return {"model": "m", "messages": messages}


def _sets(url: str) -> list[str]:
    return ["conductor.port=0", f"router.cells=one={url}", "conductor.leave_s=0", "log.level=error"]


async def _ready(session: aiohttp.ClientSession) -> None:
    async with asyncio.timeout(30):
        while True:
            async with session.get("/readyz") as answer:
                if answer.status == 200:
                    return
            await asyncio.sleep(0.05)


async def _send(session: aiohttp.ClientSession, body: dict[str, Any], number: int) -> None:
    async def one(_: int) -> None:
        async with session.post("/v1/chat/completions", json=body) as answer:
            answer.raise_for_status()
            await answer.read()

    await each(range(number), _AT_ONCE, one)


@asynccontextmanager
async def _stand_in() -> AsyncIterator[str]:
    """A cell's conductor in this process: answers at once, streams of one event a turn of the loop."""
    summary = {"ready": True, "models": ["m"], "num_conductors": 1, "num_nodes": 1, "hot": []}
    summary |= {"num_requests": 0, "requests_per_s": 0.0}
    event = (
        b"data: " + json.dumps({"choices": [{"index": 0, "delta": {"content": " word"}}]}).encode() + b"\n\n"
    )

    async def cell(http: web.Request) -> web.Response:
        return web.json_response(summary)

    async def answer(http: web.Request) -> web.StreamResponse:
        if not (await http.json()).get("stream"):
            return web.json_response({"choices": [{"message": {"content": "x" * 500}}]})
        stream = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await stream.prepare(http)
        for _ in range(_EVENTS):
            await stream.write(event)
            await asyncio.sleep(0.001)
        return stream

    app = web.Application()
    app.add_routes([web.get("/v1/cell", cell), web.post("/v1/chat/completions", answer)])
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
