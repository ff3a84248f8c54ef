"""Long outputs and long prompts on two clusters: requests stay where they were placed, or move."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from statistics import median

from moonpool.bench.harness.command import Run
from moonpool.bench.harness.turns import gaps, quantile, spread, turns
from moonpool.bench.serve.client.answer import read_text
from moonpool.bench.serve.client.cluster import cluster_servers
from moonpool.bench.serve.client.server import Server
from moonpool.bench.serve.client.workload import Prompts
from moonpool.bench.serve.colocated import Load
from moonpool.runtime.reports.report import Row, versus

STAYS, MOVES = "requests stay", "requests move"
_CAUSES = "drain,defragment,hot-spot,priority"
_CLUSTER = ("cluster.prefill=1", "cluster.decode=2", "conductor.rejection=none", "engine.pool_nbytes=16MiB")
_FORMS = {STAYS: "drain", MOVES: _CAUSES}
_MOVED = re.compile(r'^moonpool_migrations_total\{cause="([^"]+)",outcome="moved"\} (\S+)$', re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Shape:
    """``streams`` at once, each as many answers one after the other; long prompts in between, one after the
    other, until the streams have ended. Lengths in tokens; outputs of streams differ, so that nodes that were
    loaded alike are not alike for long. Pools have room for 2,700 tokens: with half of the streams on either
    node a long prompt often has no room on one, and has on both together."""

    streams: int = 6
    answers: int = 6
    stream_prompt: int = 192
    stream_output: tuple[int, int] = (256, 1024)
    long_prompt: int = 1250
    long_output: int = 32

    @property
    def case(self) -> str:
        least, most = self.stream_output
        return (
            f"{self.streams} streams of {self.stream_prompt} + {least} to {most} tokens, "
            f"prompts of {self.long_prompt} + {self.long_output} in between"
        )


QUICK = Shape(streams=3, answers=1, stream_prompt=64, stream_output=(16, 32), long_prompt=256, long_output=8)


async def run_load(server: Server, shape: Shape, number: int) -> Load:
    """The same lengths in each round, and prompts of their own. Raises ``RequestFailed``."""
    done, rng = Load(), random.Random(0)
    prompts = Prompts(0, f"tail {number}")

    async def stream(lengths: Sequence[int]) -> None:
        for length in lengths:
            done.streams.append(await server.ask(prompts.draw(shape.stream_prompt), length))

    lengths = [
        [rng.randint(*shape.stream_output) for _ in range(shape.answers)] for _ in range(shape.streams)
    ]
    async with asyncio.TaskGroup() as group:
        streams = [group.create_task(stream(some)) for some in lengths]
        while not all(one.done() for one in streams):
            done.longs.append(await server.ask(prompts.draw(shape.long_prompt), shape.long_output))
    return done


async def tail_rows(run: Run, sets: Sequence[str], tbt_s: float) -> AsyncIterator[Row]:
    """``tbt_s``: target of the time between two tokens, for both clusters; 0: none, and no hot spots."""
    shape = QUICK if run.quick else Shape()
    target = (f"conductor.slo_tbt_s={tbt_s}",) if tbt_s else ()
    loads: dict[str, list[Load]] = {name: [] for name in _FORMS}
    forms = {
        name: (*_CLUSTER, f"conductor.migrate={causes}", *target, *sets) for name, causes in _FORMS.items()
    }
    async with cluster_servers(run, forms) as servers:

        async def one(name: str) -> list[float]:
            loads[name].append(await run_load(servers[name], shape, len(loads[name])))
            return []

        await turns({name: partial(one, name) for name in _FORMS}, run.rounds, rotate=1)
        metrics = {name: read_text(await server.http.get("/metrics")) for name, server in servers.items()}
    values = {name: _figures(loads[name][1:]) for name in _FORMS}
    for row in beside_rows(shape.case, values):
        yield row
    found = {cause: float(count) for cause, count in _MOVED.findall(metrics[MOVES])}
    for cause in _CAUSES.split(","):
        yield Row(f"{MOVES}: {shape.case}", f"moves: {cause}", found.get(cause, 0.0), "moves")


def beside_rows(case: str, values: Mapping[str, Mapping[str, Sequence[float]]]) -> Iterator[Row]:
    """The seconds of each metric in both forms, and the tail where requests move. ``values``: by form."""
    for metric, ours in values[MOVES].items():
        theirs = values[STAYS][metric]
        yield spread(f"{STAYS}: {case}", metric, theirs, "ms", 1e3)
        yield versus(spread(f"{MOVES}: {case}", metric, ours, "ms", 1e3), STAYS, 1e3 * median(theirs))
        tail = Row(f"{MOVES}: {case}", f"{metric}, p99", 1e3 * quantile(ours, 0.99), "ms")
        yield versus(tail, STAYS, 1e3 * quantile(theirs, 0.99))


def _figures(loads: Sequence[Load]) -> dict[str, list[float]]:
    streams = list(chain(*(load.streams for load in loads)))
    longs = list(chain(*(load.longs for load in loads)))
    return {
        "TTFT, streams": [answer.ttft_s for answer in streams],
        "TTFT, long prompts": [answer.ttft_s for answer in longs],
        "second token, long prompts": [answer.token_s[1] - answer.sent_s for answer in longs],
        "TBT, streams": list(chain(*(gaps(answer.token_s) for answer in streams))),
    }
