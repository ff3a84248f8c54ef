"""The conductor's cost of a request over HTTP, of its booking among conductors, and of a streamed token."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from statistics import median
from time import perf_counter, process_time

from moonpool.bench.conductor.decisions import Settings
from moonpool.bench.harness.child import Child, cpu_s_of, cpu_s_of_children, served
from moonpool.bench.harness.command import Run
from moonpool.bench.harness.services import daemon, redis
from moonpool.bench.harness.turns import each, spread, turns
from moonpool.bench.serve.client.answer import read_answer, read_json, status_of
from moonpool.bench.serve.client.http_client import HttpClient
from moonpool.bench.serve.client.server import COMPLETIONS, RequestFailed, new_request_id
from moonpool.runtime.reports.report import Row

_READY_S = 60.0
CONCURRENCY = 32
# The time of a prefill and of a decode on the nodes: 32 requests are then a load, not a flood.
DELAY_S = 0.1
STREAM_TOKENS = 2000
_PROMPT_TOKENS = 128
_NAMESPACE = "bench"
_BOOKING = "two conductors, 2 + 2 nodes, one request at a time"
_MEET_S = 30.0
_BOOKING_WARM_UP = 8  # requests of each, past the slow start of nodes
_WORKERS = (1, 2)


async def http_rows(run: Run, settings: Settings) -> AsyncIterator[Row]:
    """Latency added to requests of ``DELAY_S`` prefill and as much decode."""
    async with cluster(DELAY_S) as (url, conductor), HttpClient(url) as client:
        await client.warm(CONCURRENCY)
        await ask(client, CONCURRENCY * 2, 2)  # also past the nodes' slow start
        cpu_s = conductor.cpu_s()
        added_s = [seconds - 2 * DELAY_S for seconds in await ask(client, settings.requests, 2)]
        cpu_s = (conductor.cpu_s() - cpu_s) / settings.requests
    case = f"HTTP, {CONCURRENCY} at a time, nodes take {2e3 * DELAY_S:.0f} ms"
    yield spread(case, "added latency", added_s, "ms", 1e3)
    yield Row(case, "conductor's CPU a request", 1e3 * cpu_s, "ms")


async def sse_rows(run: Run, settings: Settings) -> AsyncIterator[Row]:
    """Tokens per second over ``CONCURRENCY`` streams, with nodes that never make it wait."""
    num_tokens = CONCURRENCY * STREAM_TOKENS
    async with cluster(0.0) as (url, conductor), HttpClient(url) as client:
        await client.warm(CONCURRENCY)
        await ask(client, CONCURRENCY * 2, 64)

        async def stream() -> list[float]:
            cpu_s, began_s = conductor.cpu_s(), perf_counter()
            await ask(client, CONCURRENCY, STREAM_TOKENS)
            return [num_tokens / (perf_counter() - began_s), (conductor.cpu_s() - cpu_s) / num_tokens]

        samples = (await turns({"stream": stream}, run.rounds, warm_up=0))["stream"]
    case = f"SSE, {CONCURRENCY} streams of {STREAM_TOKENS} tokens"
    yield Row(case, "tokens", median(samples[::2]), "tokens/s")
    yield Row(case, "conductor's CPU a token", 1e6 * median(samples[1::2]), "µs")


async def booking_rows(run: Run, settings: Settings) -> AsyncIterator[Row]:
    """Seconds from a request's start in the core until it is placed and booked, of both and of each."""
    found: dict[str, list[float]] = {"the one that decides": [], "the other": []}
    async with (
        conductors(2, 0.0, prefill=2, decode=2) as running,
        HttpClient(running[0][0]) as one,
        HttpClient(running[1][0]) as two,
    ):
        clients = await _by_id([one, two])
        for number in range(-_BOOKING_WARM_UP, max(settings.requests // 4, 16)):
            for seconds, client in zip(found.values(), clients, strict=True):
                placed_s = await _placed_s(client, number)
                if number >= 0:
                    seconds.append(placed_s)
    both = [value for pair in zip(*found.values(), strict=True) for value in pair]
    yield spread(_BOOKING, "placement and booking", both, "ms", 1e3)
    for name, seconds in found.items():
        yield spread(_BOOKING, f"placement and booking, {name}", seconds, "ms", 1e3)


async def _by_id(clients: Sequence[HttpClient]) -> list[HttpClient]:
    """In the order of the conductors' ids: the first one decides. Waits until they know each other."""
    ids: list[str] = []
    async with asyncio.timeout(_MEET_S):
        for client in clients:
            while True:
                _, cluster = read_json(await client.get("/v1/cluster"))
                if cluster["num_other_conductors"] == len(clients) - 1:
                    break
                await asyncio.sleep(0.05)
            ids.append(cluster["conductor_id"])
    return [client for _, client in sorted(zip(ids, clients, strict=True), key=lambda pair: pair[0])]


async def _placed_s(client: HttpClient, number: int) -> float:
    prompt = [3 + (number + i) % 2000 for i in range(_PROMPT_TOKENS)]
    request_id = new_request_id()
    body = json.dumps({"prompt": prompt, "max_tokens": 2}).encode()
    answer = await client.post(COMPLETIONS, body, {"x-request-id": request_id})
    if (status := status_of(answer)) != 200:
        raise RequestFailed(f"the conductor answered {status}")
    _, timeline = read_json(await client.get(f"/v1/requests/{request_id}/timeline"))
    return next(float(event["at_s"]) for event in timeline["events"] if event["event"] == "placed")


async def worker_rows(run: Run, settings: Settings) -> AsyncIterator[Row]:
    """Each number in turn; then two beside one, and beside what the cores have left for them.

    Client, nodes and Redis run on the same cores, so that the CPU of a token says how it scales with more.
    """
    num_tokens = CONCURRENCY * STREAM_TOKENS
    async with AsyncExitStack() as stack:
        contestants = {}
        for count in _WORKERS:
            running = conductors(1, 0.0, sets=[f"conductor.workers={count}"])
            ((url, child),) = await stack.enter_async_context(running)
            client = await stack.enter_async_context(HttpClient(url))
            await client.warm(CONCURRENCY)
            await ask(client, CONCURRENCY * 2, 64)

            async def stream(client: HttpClient = client, child: Child = child) -> list[float]:
                cpu_s, all_s, began_s = _workers_cpu_s(child), _all_cpu_s(), perf_counter()
                await ask(client, CONCURRENCY, STREAM_TOKENS)
                seconds = perf_counter() - began_s
                each = [new - old for new, old in zip(_workers_cpu_s(child), cpu_s, strict=True)]
                return [
                    num_tokens / seconds,
                    sum(each) / num_tokens,
                    (_all_cpu_s() - all_s) / num_tokens,
                    max(each) / sum(each),
                ]

            contestants[count] = stream
        found = await turns(contestants, run.rounds, warm_up=1, rotate=1)
    tokens, own, whole, busiest = ({n: median(found[n][i::4]) for n in _WORKERS} for i in range(4))
    for count in _WORKERS:
        case = f"SSE, {CONCURRENCY} streams, workers: {count}"
        yield Row(case, "tokens", tokens[count], "tokens/s")
        yield Row(case, "workers' CPU a token", 1e6 * own[count], "µs")
        yield Row(case, "CPU a token with client and nodes", 1e6 * whole[count], "µs")
    one, many = _WORKERS
    case = f"SSE, {many} workers beside {one}"
    yield Row(case, "tokens of each", tokens[many] / tokens[one] / many, "×")
    yield Row(case, "workers' CPU a token", own[many] / own[one], "×")
    cores = len(os.sched_getaffinity(0))
    yield Row(case, f"of {cores} cores in use", tokens[many] * whole[many] / cores, "×")
    yield Row(case, "the busiest worker's part of the CPU", busiest[many], "×")


def _workers_cpu_s(child: Child) -> list[float]:
    """Processor seconds of each worker."""
    return [cpu_s_of(one["pid"]) for one in child.ready.get("replicas", [child.ready])]


def _all_cpu_s() -> float:
    return process_time() + cpu_s_of_children()


async def ask(client: HttpClient, count: int, max_tokens: int, at_once: int = CONCURRENCY) -> list[float]:
    """``count`` streamed completions, ``at_once`` at a time: seconds of each."""
    seconds: list[float] = []

    async def one(number: int) -> None:
        # Prompts of their own, which no cache has.
        prompt = [3 + (number + i) % 2000 for i in range(_PROMPT_TOKENS)]
        body = json.dumps({"prompt": prompt, "max_tokens": max_tokens, "stream": True}).encode()
        exchange = await client.post(COMPLETIONS, body)
        if max_tokens < 100 and (error := read_answer(exchange).error):
            raise RequestFailed(f"the conductor answered {error}")
        seconds.append(exchange.done_s - exchange.sent_s)

    await each(range(count), at_once, one)
    return seconds


@asynccontextmanager
async def cluster(delay_s: float, prefill: int = 1, decode: int = 2) -> AsyncIterator[tuple[str, Child]]:
    """A conductor over nodes that compute nothing: the URL of its API, and its process."""
    async with conductors(1, delay_s, prefill, decode) as ((url, child),):
        yield url, child


@asynccontextmanager
async def conductors(
    count: int, delay_s: float, prefill: int = 1, decode: int = 2, *, sets: Sequence[str] = ()
) -> AsyncIterator[list[tuple[str, Child]]]:
    """As ``cluster``, with several conductors over the same nodes. ``sets``: options of them."""
    async with AsyncExitStack() as stack:
        redis_url = await stack.enter_async_context(redis())
        sets = [*sets, f"index.redis_url={redis_url}", f"index.namespace={_NAMESPACE}"]
        nodes = served(
            "nodes",
            "moonpool.bench.conductor.fake_nodes",
            "FakeNodes",
            redis_url=redis_url,
            namespace=_NAMESPACE,
            delay_s=delay_s,
            counts={"prefill": prefill, "decode": decode},
        )
        await stack.enter_async_context(nodes)
        sets += ["conductor.port=0", "node.port=0", "conductor.leave_s=0", "log.level=warning"]
        running = []
        for _ in range(count):
            child = await stack.enter_async_context(daemon("moonpool.conductor", sets))
            url = str(child.ready["url"])
            async with HttpClient(url) as client, asyncio.timeout(_READY_S):
                # Connections of their own, to all workers.
                await client.warm(CONCURRENCY)
                while not await _is_ready(client):  # noqa: ASYNC110 - other processes decide
                    await asyncio.sleep(0.05)
            running.append((url, child))
        yield running


async def _is_ready(client: HttpClient) -> bool:
    exchanges = await asyncio.gather(*(client.get("/readyz") for _ in range(CONCURRENCY)))
    return all(status_of(one) == 200 for one in exchanges)
