"""How the cost of a request grows: with blocks, with nodes, with streams; and memory with requests."""

from __future__ import annotations

from statistics import median

from moonpool.bench.conductor.decisions import Population, Settings, measure
from moonpool.bench.conductor.overhead import CONCURRENCY, ask, cluster
from moonpool.bench.harness.child import Child
from moonpool.bench.harness.command import Run
from moonpool.bench.harness.sizes import MIB
from moonpool.bench.serve.client.http_client import HttpClient
from moonpool.runtime.reports.report import Row

_BLOCKS = (128, 1_280, 12_800)  # chains of 128: 1, 10, 100
_NODES = (2, 8, 32, 64)
_STREAMS = (1, 16, 256)
_TOKENS, _QUICK_TOKENS = 512, 64  # of each stream
# Rings of timelines, prefixes and latencies are full after this many.
_FILLED = 20_000
_REQUESTS = 100_000
_QUICK = 100  # times fewer requests


async def growth_rows(run: Run, settings: Settings) -> list[Row]:
    """Each size, and the ratio of the largest to the smallest; a cost that does not grow has 1."""
    clusters = {
        "blocks, 16 nodes": {size: (16, size) for size in _BLOCKS},
        "nodes, 10,000 blocks": {size: (size, 10_000) for size in _NODES},
    }
    rows: list[Row] = []
    for what, sized in clusters.items():
        sizes = tuple(sized)
        populations = (Population(*both, settings.policy) for both in sized.values())
        costs = [median(measure(one, settings.decisions)) for one in populations]
        rows += _growth(f"decision: {what}", "CPU", sizes, costs)
    async with cluster(0.0) as (url, conductor), HttpClient(url) as client:
        await ask(client, CONCURRENCY * 2, 64)
        tokens = _QUICK_TOKENS if run.quick else _TOKENS
        costs = [await _token_s(client, conductor, streams, tokens) for streams in _STREAMS]
        rows += _growth("SSE: streams", "CPU a token", _STREAMS, costs)
        filled, requests = (size // (_QUICK if run.quick else 1) for size in (_FILLED, _REQUESTS))
        await ask(client, filled, 2)
        before = conductor.rss_nbytes()
        run.say(f"{requests - filled:,} more requests")
        await ask(client, requests - filled, 2)
        after = conductor.rss_nbytes()
    case = f"memory after {filled:,} and {requests:,} requests"
    return [
        *rows,
        Row(case, "before", before / MIB, "MiB"),
        Row(case, "growth", after / before, "×"),
        Row(case, "growth a request", (after - before) / (requests - filled), "bytes"),
    ]


def _growth(case: str, metric: str, sizes: tuple[int, ...], costs_s: list[float]) -> list[Row]:
    rows = [Row(f"{case}, {size:,}", metric, 1e6 * s, "µs") for size, s in zip(sizes, costs_s, strict=True)]
    return [*rows, Row(case, f"{metric} at {sizes[-1]:,} over {sizes[0]:,}", costs_s[-1] / costs_s[0], "×")]


async def _token_s(client: HttpClient, conductor: Child, streams: int, tokens: int) -> float:
    """Processor seconds of the conductor for a token of one of ``streams`` at once, ``tokens`` each."""
    await client.warm(streams)
    count = max(streams, CONCURRENCY)  # of one at a time as many tokens as of some
    cpu_s = conductor.cpu_s()
    await ask(client, count, tokens, at_once=streams)
    return (conductor.cpu_s() - cpu_s) / (count * tokens)
