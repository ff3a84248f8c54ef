"""What a conductor adds to a request over HTTP, and how many tokens it streams: real processes."""

from __future__ import annotations

import asyncio
import json
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from time import perf_counter
from urllib.parse import urlsplit

import numpy as np
import psutil

from moonpool.bench.harness.redis import private_redis
from moonpool.bench.serve.client.answer import read_answer
from moonpool.bench.serve.client.http_client import HttpClient
from moonpool.bench.serve.client.server import COMPLETIONS
from moonpool.runtime.errors import MoonpoolError
from moonpool.runtime.reports.report import Row
from moonpool.runtime.service.tied_command import tied_command

_READY_S = 60.0
_CONCURRENCY = 32
# A request stays this long on the nodes, so that 32 of them are a load and not a flood.
_DELAY_S = 0.1
_STREAM_TOKENS = 2000
_ROUNDS = 5
_PROMPT_TOKENS = 128
_DASHBOARD_NODES = 64
_DASHBOARD_S = 6.0


class ChildFailed(MoonpoolError):
    """A process of the benchmark did not start, or answered an error."""


async def http_rows(requests: int) -> list[Row]:
    """Latency added to requests of ``_DELAY_S`` prefill and as much decode."""
    async with _cluster(_DELAY_S) as (url, process), HttpClient(url) as client:
        await client.warm(_CONCURRENCY)
        await _ask(client, _CONCURRENCY * 2, 2)  # also past the nodes' slow start
        cpu_s = _cpu_s(process)
        added_s = [seconds - 2 * _DELAY_S for seconds in await _ask(client, requests, 2)]
        cpu_s = (_cpu_s(process) - cpu_s) / requests
    p50, p99 = (float(np.quantile(added_s, q)) * 1e3 for q in (0.5, 0.99))
    case = f"HTTP, {_CONCURRENCY} at a time, nodes take {2e3 * _DELAY_S:.0f} ms"
    return [
        Row(case, "added latency", p50, "ms", p50=p50, p99=p99, limit="at most", limit_value=5.0),
        Row(case, "conductor's CPU a request", cpu_s * 1e3, "ms"),
    ]


async def sse_rows() -> list[Row]:
    """Tokens a second over ``_CONCURRENCY`` streams, with nodes that never make it wait."""
    rates, cpus = [], []
    async with _cluster(0.0) as (url, process), HttpClient(url) as client:
        await client.warm(_CONCURRENCY)
        await _ask(client, _CONCURRENCY * 2, 64)
        for _ in range(_ROUNDS):
            cpu_s, began_s = _cpu_s(process), perf_counter()
            await _ask(client, _CONCURRENCY, _STREAM_TOKENS)
            num_tokens = _CONCURRENCY * _STREAM_TOKENS
            rates.append(num_tokens / (perf_counter() - began_s))
            cpus.append(1e6 * (_cpu_s(process) - cpu_s) / num_tokens)
    rate = float(np.median(rates))
    case = f"SSE, {_CONCURRENCY} streams of {_STREAM_TOKENS} tokens"
    return [
        Row(case, "tokens", rate, "tokens/s", limit="at least", limit_value=50_000.0),
        Row(case, "conductor's CPU a token", float(np.median(cpus)), "µs"),
    ]


async def dashboard_rows() -> list[Row]:
    """What somebody who looks at the dashboard costs the conductor of a large cluster, second by second.

    Measured between requests, after enough of them: beside a load the difference drowns in its spread, and a
    snapshot costs the same then.
    """
    half = _DASHBOARD_NODES // 2
    shares: dict[bool, list[float]] = {False: [], True: []}
    async with _cluster(_DELAY_S, half, half) as (url, process), HttpClient(url) as client:
        await client.warm(_CONCURRENCY)
        await _ask(client, 400, 2)
        for watched in (False, True) * _ROUNDS:
            cpu_s, began_s = _cpu_s(process), perf_counter()
            if watched:
                assert await _watch(url) >= _DASHBOARD_S - 1, "it saw too few snapshots"
            else:
                await asyncio.sleep(_DASHBOARD_S)
            shares[watched].append((_cpu_s(process) - cpu_s) / (perf_counter() - began_s))
    cost = float(np.median(shares[True]) - np.median(shares[False]))
    case = f"dashboard, {_DASHBOARD_NODES} nodes"
    return [
        Row(case, "a viewer's share of a core", 100 * cost, "%", limit="at most", limit_value=2.0),
        Row(case, "the conductor's without", 100 * float(np.median(shares[False])), "%"),
    ]


async def _watch(url: str) -> int:
    """Look for ``_DASHBOARD_S``; how many snapshots came."""
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port, limit=1 << 24)
    writer.write(f"GET /v1/live HTTP/1.1\r\nHost: {parts.netloc}\r\n\r\n".encode())
    events = 0
    with suppress(TimeoutError):
        async with asyncio.timeout(_DASHBOARD_S):
            async for line in reader:
                events += line.startswith(b"data: ")
    writer.close()
    return events


async def _ask(client: HttpClient, count: int, max_tokens: int) -> list[float]:
    """``count`` streamed completions, ``_CONCURRENCY`` at a time: seconds of each."""
    left = iter(range(count))
    seconds: list[float] = []

    async def worker() -> None:
        for number in left:
            # Prompts of their own: nothing to be said about a cache that is not there.
            prompt = [3 + (number + i) % 2000 for i in range(_PROMPT_TOKENS)]
            body = json.dumps({"prompt": prompt, "max_tokens": max_tokens, "stream": True}).encode()
            exchange = await client.post(COMPLETIONS, body)
            if max_tokens < 100 and (error := read_answer(exchange).error):
                raise ChildFailed(f"the conductor answered {error}")
            seconds.append(exchange.done_s - exchange.sent_s)

    async with asyncio.TaskGroup() as group:
        for _ in range(min(_CONCURRENCY, count)):
            group.create_task(worker())
    return seconds


@asynccontextmanager
async def _cluster(
    delay_s: float, prefill: int = 1, decode: int = 2
) -> AsyncIterator[tuple[str, psutil.Process]]:
    """A conductor over fake nodes: the URL of its API, and its process."""
    with private_redis() as redis_url:
        namespace = "bench"
        sets = [
            f"index.redis_url={redis_url}",
            f"index.namespace={namespace}",
            "conductor.port=0",
            "log.level=warning",
        ]
        options = [word for one in sets for word in ("--set", one)]
        words = [redis_url, namespace, delay_s, prefill, decode]
        nodes_command = ["-m", "moonpool.bench.conductor.fake_nodes", *map(str, words)]
        async with _child(nodes_command), _child(["-m", "moonpool.conductor", *options]) as (child, ready):
            url = str(ready["url"])
            async with HttpClient(url) as client:
                async with asyncio.timeout(_READY_S):
                    while not await _is_ready(client):  # noqa: ASYNC110 - another process decides
                        await asyncio.sleep(0.05)
            yield url, psutil.Process(child.pid)


async def _is_ready(client: HttpClient) -> bool:
    answer = b"".join(data for _, data in (await client.get("/readyz")).packets)
    return answer.startswith(b"HTTP/1.1 200")


@asynccontextmanager
async def _child(arguments: Sequence[str]) -> AsyncIterator[tuple[Process, dict[str, object]]]:
    """A Python process that prints one JSON line when it is ready."""
    process = await asyncio.create_subprocess_exec(
        *tied_command([sys.executable, *arguments]), stdin=PIPE, stdout=PIPE
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(_READY_S):
            line = await process.stdout.readline()
        if not line.startswith(b"{"):
            raise ChildFailed(f"{' '.join(arguments[:2])} ended before it was ready")
        yield process, json.loads(line)
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system
