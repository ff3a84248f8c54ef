"""The command ``moonpool bench drill``."""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from moonpool.bench.chaos.disk import DiskUnavailable, LoopDisk
from moonpool.bench.chaos.faults import ClusterFaults
from moonpool.bench.chaos.load import Counts, KnownLoad
from moonpool.bench.drill.beside import Link, gpu_node, second_conductor
from moonpool.bench.drill.course import CapacityWatch, Course, FailureWatch, reading
from moonpool.bench.drill.drills import DRILLS, Drill, Scene
from moonpool.bench.harness.command import Rows, Run, benchmark
from moonpool.bench.harness.shapes import models_of
from moonpool.bench.harness.turns import percentiles, spread
from moonpool.bench.serve.client.answer import read_answer, read_json
from moonpool.bench.serve.client.http_client import HttpClient
from moonpool.bench.serve.client.server import Server, new_request_id
from moonpool.local.cluster import LocalCluster
from moonpool.runtime.config.loading import load_config
from moonpool.runtime.reports.conditions import CacheState, Conditions
from moonpool.runtime.reports.report import Row

# A short deadline: a request that hangs is seen.
_SETS = ("conductor.port=0", "conductor.request_timeout_s=30", "index.lease_ttl_s=3")
_HUNG_AFTER_S = 60.0
_CALM_S = 4.0  # under load, before the fault
_DISK_NBYTES = 2 << 30
# A request is late if it takes longer than this many times the slowest one before the fault.
_LATE = 2.0
_TABLE_COLUMNS = 140  # of text, also where the terminal has fewer
# Prompts with the same prefix.
_GROUP_PROMPTS = 2


@dataclass(frozen=True, slots=True)
class Settings:
    seed: int
    sets: tuple[str, ...]


def _part(drill: Drill) -> Callable[[Run, Settings], Rows]:
    async def rows(run: Run, settings: Settings) -> list[Row]:
        found: list[Row] = []
        for name, sets, restarts in drill.arms():
            try:
                course = await _run(drill, (*_SETS, *sets, *settings.sets), restarts, settings.seed)
            except DiskUnavailable as error:
                run.say(f"left out: {error}")
                break
            _show(drill, name, course)
            found += _rows(f"{drill.name}, {name}", course)
        return found

    return rows


async def _run(drill: Drill, sets: tuple[str, ...], restarts: bool, seed: int) -> Course:
    async with AsyncExitStack() as stack:
        disk = None
        if drill.needs_disk:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="drill-")))
            disk = stack.enter_context(LoopDisk(directory, _DISK_NBYTES))
            sets = (*sets, f"store.ssd.path={disk.path}")
        cluster = await stack.enter_async_context(LocalCluster(load_config(None, sets), restart=restarts))
        urls, link, node = [cluster.url], None, None
        if drill.needs_gpu:
            node = await stack.enter_async_context(gpu_node(cluster))
        if drill.splits:
            assert cluster.redis is not None
            link = await stack.enter_async_context(Link.to(cluster.redis.socket))
            urls.append(await stack.enter_async_context(second_conductor(cluster, link)))
        https = [await stack.enter_async_context(HttpClient(url)) for url in urls]
        servers = [await Server.find("cluster", http) for http in https]
        load = KnownLoad(servers[0], seed, _HUNG_AFTER_S, _GROUP_PROMPTS)
        await load.learn()
        _, state = read_json(await https[0].get("/v1/cluster"))
        pages = [*(f"{url}/metrics" for url in urls), *(one["metrics_url"] for one in state["nodes"])]
        watches = FailureWatch(pages), CapacityWatch(https[0])
        await stack.enter_async_context(reading(*watches))
        counts, rng = Counts(), random.Random(seed)

        async def more(streams: int, seconds: float) -> None:
            over = asyncio.Event()
            asyncio.get_running_loop().call_later(seconds, over.set)
            await load.run(streams, over, rng, counts)

        async def ask(prompt: list[int], output_tokens: int) -> None:
            asked, request_id = servers[0].send, new_request_id()
            answer = read_answer(await asked(prompt, output_tokens, request_id))
            counts.answers.append(replace(answer, id=request_id))

        scene = Scene(cluster, ClusterFaults(cluster, disk), restarts, more, ask, disk, link, node)
        return await _measure(drill, scene, [load.at(server) for server in servers], watches, counts)


async def _measure(
    drill: Drill,
    scene: Scene,
    loads: Sequence[KnownLoad],
    watches: tuple[FailureWatch, CapacityWatch],
    counts: Counts,
) -> Course:
    until, course, (watch, capacity) = asyncio.Event(), Course(), watches
    running = [
        asyncio.create_task(load.run(drill.streams // len(loads), until, random.Random(number), counts))
        for number, load in enumerate(loads)
    ]
    try:
        await asyncio.sleep(_CALM_S)
        calm = [answer.e2e_s for answer in counts.answers if not answer.error]
        watch.forget()
        capacity.forget()
        fault_s, fault_unix_s = time.perf_counter(), time.time()
        await drill.fault(scene)
        await asyncio.sleep(drill.after_s)
    finally:
        until.set()
        await asyncio.gather(*running)
    await watch.read()
    await capacity.read()
    course.missing_s = capacity.missing_s
    course.count(counts.answers, fault_s, _LATE * max(calm, default=_HUNG_AFTER_S))
    course.lost += counts.hung + len(counts.different)
    course.total += counts.hung
    for answer in counts.answers:
        for load in loads if answer.done_s >= fault_s else ():
            status, timeline = read_json(await load.server.http.get(f"/v1/requests/{answer.id}/timeline"))
            if status == 200:
                course.add(timeline, fault_unix_s)
    if not course.classes and watch.first_s:
        # No request noticed: what processes counted, and when the first one did.
        course.classes.update(failure for failure, _ in watch.first_s)
        course.detect_s.append(max(min(watch.first_s.values()) - fault_unix_s, 0.0))
    if watch.without_index_s > fault_unix_s and watch.has_index:
        course.recover_s.append(watch.without_index_s - fault_unix_s)
    return course


def _rows(case: str, course: Course) -> Iterator[Row]:
    for metric, values in (
        ("detected after", course.detect_s),
        ("placed again after", course.contain_s),
        ("next token after", course.recover_s),
    ):
        if values:
            yield Row(case, metric, max(values), "s", samples=values)
    for metric, values in (("first token", course.ttft_s), ("request", course.e2e_s)):
        if values:
            yield spread(case, metric, values, "s")
            yield Row(case, f"slowest {metric}", max(values), "s")
    yield Row(case, "capacity missing", course.missing_s, "node-s")
    for metric, value in (
        ("failed attempts", course.num_failed_attempts),
        ("retries that succeeded", course.num_recovered),
        ("tokens computed twice", course.recomputed_tokens),
        ("preempted", course.preempted),
        ("lost requests", course.lost),
        ("late requests", course.late),
        ("rejected requests", course.rejected),
        ("requests", course.total),
    ):
        yield Row(case, metric, float(value), "count")


def _show(drill: Drill, arm: str, course: Course) -> None:
    """Seconds, the longest of each time; — where there was none. Percentiles are of whole requests."""

    def longest(values: list[float]) -> str:
        return f"{max(values):.2f}" if values else "—"

    classes = ", ".join(name for name, _ in course.classes.most_common()) or "none"
    of_all = percentiles(course.e2e_s or [0.0])
    cells = {
        "class": classes,
        "detect": longest(course.detect_s),
        "contain": longest(course.contain_s),
        "recover": longest(course.recover_s),
        "p50": f"{of_all['p50']:.2f}",
        "p99": f"{of_all['p99']:.2f}",
        "slowest": longest(course.e2e_s),
        "first token": longest(course.ttft_s),
        "missing": f"{course.missing_s:.1f}",
        "retried": str(course.num_recovered),
        "twice": str(course.recomputed_tokens),
        "lost": str(course.lost),
        "late": str(course.late),
        "rejected": str(course.rejected),
        "of": str(course.total),
    }
    title = f"{drill.name}, {arm}: {drill.mitigation}; seconds, node-seconds, tokens, requests"
    table = Table(title=title, title_justify="left")
    for column in cells:
        table.add_column(column, justify="right")
    table.add_row(*cells.values())
    console = Console(highlight=False)
    console.width = max(console.width, _TABLE_COLUMNS)
    console.print(table)


@benchmark(
    {drill.name: _part(drill) for drill in DRILLS},
    packages=("torch", "aiohttp", "grpcio", "redis", "uvloop"),
    rounds=None,
)
@click.option("--seed", default=0, show_default=True, help="Of prompts and their order.")
@click.option("--set", "sets", multiple=True, metavar="KEY=VALUE", help="Option of the local cluster.")
def drill(run: Run, seed: int, sets: tuple[str, ...]) -> Settings:
    """Cause one failure of each kind under load, with and without what is there against it.

    For each: its class, the longest time to detect it (from the fault to a request's failed attempt; where no
    request notices, to the first process that counts it), to contain it (until the request is placed again)
    and to recover (until its next token; of the index, until every process has it again), the capacity that
    was missing meanwhile (node-seconds), the retries that succeeded, the tokens computed twice, and the
    requests that were lost, late or rejected. The drill of the disk needs root; its stand-in stops writes,
    not reads. docs/runbooks.md has a runbook for each.
    """
    if run.quick and not run.named:
        run.parts = run.parts[:1]
    run.conditions = Conditions(
        models_of((*_SETS, *sets)),
        CacheState.holding(
            0, 0, "a new cluster for each; warm by the load's own prompts when the fault comes"
        ),
        f"each prompt once, to learn its answer; then {_CALM_S:g} s of load",
        {"prompts and their order": seed},
    )
    return Settings(seed, sets)
