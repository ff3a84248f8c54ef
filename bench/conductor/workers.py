"""Tokens of SSE through one worker of a conductor and through two (``conductor.workers``)."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from statistics import median
from time import perf_counter, process_time

from moonpool.bench.conductor.decisions import Settings
from moonpool.bench.conductor.overhead import CONCURRENCY, STREAM_TOKENS, ask, conductors
from moonpool.bench.harness.child import Child, cpu_s_of, cpu_s_of_children
from moonpool.bench.harness.command import Run
from moonpool.bench.harness.turns import turns
from moonpool.bench.serve.client.http_client import HttpClient
from moonpool.runtime.reports.report import Row

_COUNTS = (1, 2)


async def worker_rows(run: Run, settings: Settings) -> AsyncIterator[Row]:
    """Each number in turn; then two beside one, and beside what the cores have left for them.

    Client, nodes and Redis run on the same cores, so that the CPU of a token says how it scales with more.
    """
    num_tokens = CONCURRENCY * STREAM_TOKENS
    async with AsyncExitStack() as stack:
        contestants = {}
        for count in _COUNTS:
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
    tokens, own, whole, busiest = ({n: median(found[n][i::4]) for n in _COUNTS} for i in range(4))
    for count in _COUNTS:
        case = f"SSE, {CONCURRENCY} streams, workers: {count}"
        yield Row(case, "tokens", tokens[count], "tokens/s")
        yield Row(case, "workers' CPU a token", 1e6 * own[count], "µs")
        yield Row(case, "CPU a token with client and nodes", 1e6 * whole[count], "µs")
    one, many = _COUNTS
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
