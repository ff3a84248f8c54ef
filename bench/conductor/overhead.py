"""The conductor's cost of a request over HTTP, of a streamed token, and of a viewer of the dashboard."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from statistics import median
from time import perf_counter
from urllib.parse import urlsplit

from moonpool.bench.conductor.decisions import Settings
from moonpool.bench.harness.child import Child, served
from moonpool.bench.harness.command import Run
from moonpool.bench.harness.services import daemon, redis
from moonpool.bench.harness.turns import spread, turns
from moonpool.bench.serve.client.answer import read_answer
from moonpool.bench.serve.client.http_client import HttpClient
from moonpool.bench.serve.client.server import COMPLETIONS, RequestFailed
from moonpool.runtime.reports.report import Row

_READY_S = 60.0
_CONCURRENCY = 32
# The time of a prefill and of a decode on the nodes: 32 requests are then a load, not a flood.
_DELAY_S = 0.1
_STREAM_TOKENS = 2000
_PROMPT_TOKENS = 128
_DASHBOARD_NODES = (64, 1024)
_VIEWERS = 8
_DASHBOARD_S = 6.0
_NAMESPACE = "bench"


async def http_rows(run: Run, settings: Settings) -> AsyncIterator[Row]:
    """Latency added to requests of ``_DELAY_S`` prefill and as much decode."""
    async with _cluster(_DELAY_S) as (url, conductor), HttpClient(url) as client:
        await client.warm(_CONCURRENCY)
        await _ask(client, _CONCURRENCY * 2, 2)  # also past the nodes' slow start
        cpu_s = conductor.cpu_s()
        added_s = [seconds - 2 * _DELAY_S for seconds in await _ask(client, settings.requests, 2)]
        cpu_s = (conductor.cpu_s() - cpu_s) / settings.requests
    case = f"HTTP, {_CONCURRENCY} at a time, nodes take {2e3 * _DELAY_S:.0f} ms"
    yield spread(case, "added latency", added_s, "ms", 1e3)
    yield Row(case, "conductor's CPU a request", 1e3 * cpu_s, "ms")


async def sse_rows(run: Run, settings: Settings) -> AsyncIterator[Row]:
    """Tokens per second over ``_CONCURRENCY`` streams, with nodes that never make it wait."""
    num_tokens = _CONCURRENCY * _STREAM_TOKENS
    async with _cluster(0.0) as (url, conductor), HttpClient(url) as client:
        await client.warm(_CONCURRENCY)
        await _ask(client, _CONCURRENCY * 2, 64)

        async def stream() -> list[float]:
            cpu_s, began_s = conductor.cpu_s(), perf_counter()
            await _ask(client, _CONCURRENCY, _STREAM_TOKENS)
            return [num_tokens / (perf_counter() - began_s), (conductor.cpu_s() - cpu_s) / num_tokens]

        samples = (await turns({"stream": stream}, run.rounds, warm_up=0))["stream"]
    case = f"SSE, {_CONCURRENCY} streams of {_STREAM_TOKENS} tokens"
    yield Row(case, "tokens", median(samples[::2]), "tokens/s")
    yield Row(case, "conductor's CPU a token", 1e6 * median(samples[1::2]), "µs")


async def dashboard_rows(run: Run, settings: Settings) -> AsyncIterator[Row]:
    """The cost of the viewers of the dashboard of large clusters: of the first, and of each one more.

    Measured between requests, after enough of them: under load the difference is smaller than its spread, and
    a snapshot costs the same.
    """
    for num_nodes in _DASHBOARD_NODES if settings.full else _DASHBOARD_NODES[:1]:
        async for row in _viewer_rows(run, num_nodes):
            yield row


async def _viewer_rows(run: Run, num_nodes: int) -> AsyncIterator[Row]:
    watched_s = _DASHBOARD_S / 3 if run.quick else _DASHBOARD_S
    nodes = num_nodes // 2
    async with _cluster(_DELAY_S, nodes, nodes) as (url, conductor), HttpClient(url) as client:
        await client.warm(_CONCURRENCY)
        await _ask(client, 400, 2)

        async def fraction(viewers: int) -> float:
            cpu_s, began_s = conductor.cpu_s(), perf_counter()
            seen = await asyncio.gather(*(_watch(url, watched_s) for _ in range(viewers)))
            if not viewers:
                await asyncio.sleep(watched_s)
            # Of large clusters they come less often.
            assert all(count >= 2 for count in seen), "a viewer saw too few snapshots"
            return (conductor.cpu_s() - cpu_s) / (perf_counter() - began_s)

        contestants = {str(count): partial(fraction, count) for count in (0, 1, _VIEWERS)}
        fractions = await turns(contestants, run.rounds, warm_up=0)
    without, one, all_of_them = (100 * median(taken) for taken in fractions.values())
    case = f"dashboard, {num_nodes} nodes"
    for metric, share in (
        ("a viewer's share of a core", one - without),
        (f"each of {_VIEWERS} viewers' share of a core", (all_of_them - without) / _VIEWERS),
    ):
        yield Row(case, metric, share, "%")
    yield Row(case, "the conductor's without", without, "%")


async def _watch(url: str, seconds: float) -> int:
    """View the dashboard; returns how many snapshots came."""
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port, limit=1 << 24)
    writer.write(f"GET /v1/live HTTP/1.1\r\nHost: {parts.netloc}\r\n\r\n".encode())
    events = 0
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            async for line in reader:
                events += line.startswith(b"data: ")
    writer.close()
    return events


async def _ask(client: HttpClient, count: int, max_tokens: int) -> list[float]:
    """``count`` streamed completions, ``_CONCURRENCY`` at a time: seconds of each."""
    numbers = iter(range(count))
    seconds: list[float] = []

    async def worker() -> None:
        for number in numbers:
            # Prompts of their own, which no cache has.
            prompt = [3 + (number + i) % 2000 for i in range(_PROMPT_TOKENS)]
            body = json.dumps({"prompt": prompt, "max_tokens": max_tokens, "stream": True}).encode()
            exchange = await client.post(COMPLETIONS, body)
            if max_tokens < 100 and (error := read_answer(exchange).error):
                raise RequestFailed(f"the conductor answered {error}")
            seconds.append(exchange.done_s - exchange.sent_s)

    async with asyncio.TaskGroup() as group:
        for _ in range(min(_CONCURRENCY, count)):
            group.create_task(worker())
    return seconds


@asynccontextmanager
async def _cluster(delay_s: float, prefill: int = 1, decode: int = 2) -> AsyncIterator[tuple[str, Child]]:
    """A conductor over nodes that compute nothing: the URL of its API, and its process."""
    async with redis() as redis_url:
        sets = [f"index.redis_url={redis_url}", f"index.namespace={_NAMESPACE}"]
        nodes = served(
            "nodes",
            "moonpool.bench.conductor.fake_nodes",
            "FakeNodes",
            redis_url=redis_url,
            namespace=_NAMESPACE,
            delay_s=delay_s,
            counts={"prefill": prefill, "decode": decode},
        )
        conductor = daemon(
            "moonpool.conductor", [*sets, "conductor.port=0", "conductor.leave_s=0", "log.level=warning"]
        )
        async with nodes, conductor as child:
            url = str(child.ready["url"])
            async with HttpClient(url) as client, asyncio.timeout(_READY_S):
                while not await _is_ready(client):  # noqa: ASYNC110 - another process decides
                    await asyncio.sleep(0.05)
            yield url, child


async def _is_ready(client: HttpClient) -> bool:
    answer = b"".join(data for _, data in (await client.get("/readyz")).packets)
    return answer.startswith(b"HTTP/1.1 200")
