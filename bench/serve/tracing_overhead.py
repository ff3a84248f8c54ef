"""The case ``tracing``: the same load on a cluster that sends spans and on one that does not, in turn.

Both run at once and are the same but for ``tracing.otlp_endpoint``; the one whose turn it is not is idle.
Spans go to a collector that is a process beside them, and what exporting costs falls into the turn of who
exports: queues are emptied twice a second instead of every five, and a turn begins when nothing comes any
more.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
import timeit
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from statistics import median

from moonpool.bench.harness.services import local_cluster
from moonpool.bench.serve.client import load
from moonpool.bench.serve.client.answer import read_json, read_text
from moonpool.bench.serve.client.http_client import HttpClient
from moonpool.bench.serve.client.server import RequestFailed, Server
from moonpool.bench.serve.client.workload import Workload
from moonpool.bench.serve.figures import output_rate, percentile
from moonpool.bench.serve.span_collector import Collector, collector
from moonpool.runtime.config.options import TracingOptions
from moonpool.runtime.observing import tracing
from moonpool.runtime.reports.report import Row, versus

# What must be left of the throughput; and what its spans may take of a request's CPU.
LEFT = 0.97
SHARE = 0.03
EXPORT_EVERY_MS = 500
SETTLED_S = 0.7

_CPU = re.compile(r"^process_cpu_seconds_total (\S+)", re.MULTILINE)

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Turn:
    """What one cluster did in one round. ``cpu_s``: of all its processes, until its spans had been sent."""

    tokens_per_s: float
    tpot_s: float
    cpu_s_per_token: float


@dataclass(frozen=True, slots=True, eq=False)
class Side:
    """One of the two clusters."""

    server: Server
    pages: Sequence[HttpClient]  # of every process that has /metrics

    async def cpu_s(self) -> float:
        pages = await asyncio.gather(*(page.get("") for page in self.pages))
        return sum(float(value) for page in pages for value in _CPU.findall(read_text(page)))

    async def turn(self, work: Workload, spans: Collector) -> Turn:
        before_s = await self.cpu_s()
        outcome = await load.run(self.server, work)
        if failed := load.failures(outcome.answers):
            raise RequestFailed(f"{self.server.name}: {failed}")
        await spans.settled(SETTLED_S)
        cpu_s = await self.cpu_s() - before_s
        num_tokens = sum(answer.output_tokens for answer in outcome.answers)
        tpot_s = median(answer.tpot_s for answer in outcome.answers)
        return Turn(output_rate(outcome), tpot_s, cpu_s / num_tokens)


async def measure(sets: Sequence[str], work: Workload, rounds: int, say: Say) -> list[Row]:
    """``rounds`` turns of each, after one that does not count; who begins changes from round to round.

    Raises:
        MoonpoolError: a cluster did not start, or failed a request. All that was started is stopped.
    """
    async with (
        collector() as spans,
        _side("tracing off", sets) as off,
        _side("tracing on", [*sets, f"tracing.otlp_endpoint={spans.url}"]) as on,
    ):
        turns: dict[Side, list[Turn]] = {off: [], on: []}
        for number in range(-1, rounds):
            if number == 0:
                before = await spans.settled(SETTLED_S)
            for side in (off, on) if number % 2 else (on, off):
                # New prompts for every turn: nobody is to find what another left in its cache.
                turn = await side.turn(replace(work, seed=work.seed + number + 1), spans)
                if number >= 0:
                    turns[side].append(turn)
            say(f"tracing: round {number + 1} of {rounds}")
        received = (await spans.settled(SETTLED_S)).since(before)
        span_s = await asyncio.to_thread(cost_of_a_span_s, spans.url)
    num_requests = rounds * work.requests * work.turns
    name = f"tracing, {work.concurrency} concurrent, {work.prompt_tokens} + {work.output_tokens} tokens"
    spans_per_request = received.spans / num_requests
    request_s = median(turn.cpu_s_per_token for turn in turns[off]) * work.output_tokens
    share = 100 * spans_per_request * span_s / request_s
    return [
        *rows(name, turns[on], turns[off]),
        Row(name, "spans a request", spans_per_request, "spans"),
        Row(name, "CPU of a span, made and sent", 1e6 * span_s, "µs"),
        Row(name, "spans' CPU, of a request's", share, "%", limit="at most", limit_value=100 * SHARE),
        Row(name, "bytes a span", received.nbytes / max(1, received.spans), "bytes"),
        Row(name, "a place for a span, tracing off", 1e9 * cost_when_off_s(), "ns"),
    ]


def rows(case: str, on: Sequence[Turn], off: Sequence[Turn]) -> list[Row]:
    """Medians side by side, and the ratio of each round's two turns with its spread."""
    found: list[Row] = []
    measured: tuple[tuple[str, str, float, Callable[[Turn], float]], ...] = (
        ("output throughput", "tokens/s", 1.0, lambda turn: turn.tokens_per_s),
        ("TPOT", "ms", 1e3, lambda turn: turn.tpot_s),
        ("CPU of all processes, a token", "ms", 1e3, lambda turn: turn.cpu_s_per_token),
    )
    for metric, unit, scale, of in measured:
        with_it, without = [scale * of(turn) for turn in on], [scale * of(turn) for turn in off]
        found.append(versus(Row(case, metric, median(with_it), unit), "tracing off", median(without)))
        ratios = [one / other for one, other in zip(with_it, without, strict=True)]
        name = f"{metric}, on over off"
        row = Row(case, name, median(ratios), "times", p50=median(ratios), p99=percentile(ratios, 99))
        found += [row, Row(case, f"{name}, least round", min(ratios), "times")]
    found[1] = replace(found[1], limit="at least", limit_value=LEFT)
    return found


def cost_when_off_s() -> float:
    """Seconds that one place in the code where a span could begin takes where nobody asked for spans."""

    def place() -> None:
        with tracing.span("nothing", num_blocks=1):
            pass

    return min(timeit.repeat(place, number=10_000, repeat=5)) / 10_000


def cost_of_a_span_s(url: str) -> float:
    """CPU seconds of one span, made and sent to ``url``: in this process, which does nothing else meanwhile.

    Of every five, two are begun and ended, and three made of what is over: as a request's are.
    """
    num_requests = 400
    end = tracing.setup_tracing(TracingOptions(otlp_endpoint=url), "bench")
    began_s = time.process_time()
    for _ in range(num_requests):
        with (
            tracing.server_span("call", "", root=True),
            tracing.span("read blocks", num_blocks=8, nbytes=1 << 20),
        ):
            tracing.outgoing_headers()
            for _ in range(3):
                tracing.record_span("compute chunk", ago_s=0.2, seconds=0.1, num_tokens=512)
    end()
    return (time.process_time() - began_s) / (5 * num_requests)


@asynccontextmanager
async def _side(name: str, sets: Sequence[str]) -> AsyncIterator[Side]:
    before = os.environ.get("OTEL_BSP_SCHEDULE_DELAY")
    os.environ["OTEL_BSP_SCHEDULE_DELAY"] = before or str(EXPORT_EVERY_MS)
    try:
        async with local_cluster(sets) as url, HttpClient(url) as http:
            server = await Server.find(name, http)
            _, cluster = read_json(await http.get("/v1/cluster"))
            urls = [f"{url}/metrics", *(node["metrics_url"] for node in cluster["nodes"])]
            yield Side(server, [HttpClient(page) for page in urls])
    finally:
        if before is None:
            del os.environ["OTEL_BSP_SCHEDULE_DELAY"]
