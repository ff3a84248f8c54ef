"""The command ``moonpool bench chaos``."""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from moonpool.bench.chaos.disk import DiskUnavailable, LoopDisk
from moonpool.bench.chaos.faults import ClusterFaults, Fault, command_faults
from moonpool.bench.chaos.load import Counts, KnownLoad
from moonpool.bench.harness.command import Run, benchmark
from moonpool.bench.harness.shapes import models_of
from moonpool.bench.harness.turns import spread
from moonpool.bench.serve.client.answer import AnswerInvalid, read_json
from moonpool.bench.serve.client.cluster import learn
from moonpool.bench.serve.client.http_client import HttpClient, ServerUnreachable
from moonpool.bench.serve.client.server import Server
from moonpool.local.cluster import LocalCluster
from moonpool.runtime.config.loading import load_config
from moonpool.runtime.errors import ConfigError
from moonpool.runtime.reports.conditions import CacheState, Conditions
from moonpool.runtime.reports.report import Row

# Small tiers, so that blocks go through all of them, and a short deadline: a request that hangs is seen.
_SETS = (
    "conductor.port=0",
    "conductor.request_timeout_s=60",
    "engine.pool_nbytes=32MiB",
    "store.host.capacity_nbytes=16MiB",
    "store.write_policy=write-through",
    "store.ssd.capacity_nbytes=192MiB",
)
# Sparse. A node with less than 256 MiB free is unhealthy.
_DISK_NBYTES = 2 << 30
_HUNG_AFTER_S = 120.0
_SETTLED_WITHIN_S = 60.0
_PAUSE_S = (0.0, 2.0)  # between two faults


@dataclass(frozen=True, slots=True)
class Settings:
    seconds: float
    seed: int
    streams: int
    url: str
    api_key: str
    commands: Mapping[str, str]
    sets: tuple[str, ...]


@dataclass(slots=True)
class _Scene:
    """A cluster under test, and what happened to it."""

    url: str
    faults: dict[str, Fault]
    cluster: ClusterFaults | None = None
    injected: Counter[str] = field(default_factory=Counter)
    num_ended: int = 0


async def chaos_rows(run: Run, settings: Settings) -> AsyncIterator[Row]:
    """The rows of one run. ``run.failed`` says what an operator must look at."""
    rng = random.Random(f"chaos {settings.seed}")
    async with AsyncExitStack() as stack:
        scene = await _scene(run, settings, stack)
        http = await stack.enter_async_context(HttpClient(scene.url, api_key=settings.api_key))
        load = KnownLoad(await Server.find("cluster", http), settings.seed, _HUNG_AFTER_S)
        await learn(run, load.server)
        run.say("learning the answers")
        await load.learn()
        counts, after, until = Counts(), Counts(), asyncio.Event()
        async with asyncio.TaskGroup() as group:
            group.create_task(load.run(settings.streams, until, random.Random(settings.seed), counts))
            await _inject(run, scene, settings.seconds, rng)
            until.set()
        not_ready, num_left, settled_s = await _settle(http)
        await load.run_once(after)
    case = f"seed {settings.seed}, {settings.seconds:g} s, {settings.streams} streams"
    for name in scene.faults:
        yield Row(case, f"fault: {name}", float(scene.injected[name]), "times")
    yield Row(case, "same texts", float(counts.same), "texts")
    for metric, value in (
        ("different texts", len(counts.different)),
        ("errors", counts.errors.total()),
        ("hung requests", counts.hung),
        ("processes that ended by themselves", scene.num_ended),
        ("nodes not ready a minute later", not_ready),
        ("blocks of pools left in use", num_left),
        ("not the same after the last fault", after.total - after.same),
    ):
        yield Row(case, metric, float(value), "count", limit="at most", limit_value=0.0)
        if value:
            run.failed.append(f"{metric}: {value}")
    for request_id in counts.different:
        run.say(f"different text: request {request_id}")
    for error, number in (counts.errors + after.errors).most_common(10):
        run.say(f"{number} × {error}")
    yield Row(case, "idle after the last fault", settled_s, "s")
    if counts.ttft_s:
        yield spread(case, "TTFT", counts.ttft_s, "ms", 1e3)


async def _scene(run: Run, settings: Settings, stack: AsyncExitStack) -> _Scene:
    if settings.url:
        return _Scene(settings.url, command_faults(settings.commands))
    directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="chaos-")))
    disk, sets = None, list(_SETS)
    try:
        disk = stack.enter_context(LoopDisk(directory, _DISK_NBYTES))
        sets.append(f"store.ssd.path={disk.path}")
    except DiskUnavailable as error:
        run.say(f"{error}; the faults of the disk are left out")
    config = load_config(None, (*sets, *settings.sets))
    cluster = await stack.enter_async_context(LocalCluster(config))
    faults = ClusterFaults(cluster, disk)
    return _Scene(cluster.url, faults.faults() | command_faults(settings.commands), faults)


async def _inject(run: Run, scene: _Scene, seconds: float, rng: random.Random) -> None:
    began_s = time.monotonic()
    names: list[str] = []
    while time.monotonic() - began_s < seconds:
        if not names:
            # Each fault once, in a new order, before any comes again.
            names = rng.sample(list(scene.faults), len(scene.faults))
        name = names.pop()
        told = await scene.faults[name](rng)
        scene.injected[name] += 1
        run.say(f"{time.monotonic() - began_s:6.1f} s  {told}")
        await asyncio.sleep(rng.uniform(*_PAUSE_S))
        for sentence in [] if scene.cluster is None else await scene.cluster.restart_ended():
            scene.num_ended += 1
            run.say(f"{time.monotonic() - began_s:6.1f} s  {sentence}")


async def _settle(http: HttpClient) -> tuple[int, int, float]:
    """Wait until every node is ready and no sequence or reader uses a block of a pool, at most a minute.

    Returns how many nodes are not ready, how many blocks are in use, and the seconds it took.
    """
    began_s = time.monotonic()
    not_ready, num_left = 1, 0
    while (not_ready or num_left) and time.monotonic() - began_s < _SETTLED_WITHIN_S:
        await asyncio.sleep(0.1)
        try:
            status, cluster = read_json(await http.get("/v1/cluster"))
        except (ServerUnreachable, AnswerInvalid):
            continue  # a proxy before the cluster may still be recovering
        nodes = cluster["nodes"] if status == 200 else []
        not_ready = sum(node["state"] != "ready" for node in nodes) if nodes else 1
        # Of other tiers this counts all blocks, cached ones too.
        pools = [tier for node in nodes for tier in node["tiers"] if tier["name"] == "pool"]
        num_left = sum(pool["num_used_blocks"] for pool in pools)
    return not_ready, num_left, time.monotonic() - began_s


@benchmark({"chaos": chaos_rows}, packages=("torch", "aiohttp", "grpcio", "redis", "uvloop"), rounds=None)
@click.option("--seconds", default=120.0, type=click.FloatRange(1), help="Of faults.")
@click.option("--seed", default=0, show_default=True, help="Of prompts, faults and their order.")
@click.option("--streams", default=8, type=click.IntRange(1), help="Requests at a time.")
@click.option("--url", default="", help="A test cluster of yours; without it a local one is started.")
@click.option(
    "--api-key", envvar=["MOONPOOL_API_KEY", "OPENAI_API_KEY"], default="", help="Sent as a bearer token."
)
@click.option(
    "--fault",
    "commands",
    multiple=True,
    metavar="NAME=COMMAND",
    help="A shell command as a fault, over when it ends; repeatable. Needed with --url.",
)
@click.option("--set", "sets", multiple=True, metavar="KEY=VALUE", help="Option of the local cluster.")
def chaos(run: Run, **given: Any) -> Settings:
    """Inject faults under load, and count texts that are the same, different, failed or hung.

    Kills and stops nodes and Redis, cuts connections, fills and stalls the disk (as root), one fault after
    the other. Never use it on a cluster that serves users. The exit status is 1 if a text differed or failed,
    a request hung, or blocks stayed in use.
    """
    pairs = [command.partition("=") for command in given["commands"]]
    for name, separator, command in pairs:
        if not (name and separator and command):
            raise ConfigError(
                f"--fault must be NAME=COMMAND, got {name + separator + command!r}", key="fault"
            )
    if given["url"] and not pairs:
        raise ConfigError("--url needs at least one --fault NAME=COMMAND", key="fault")
    if run.quick:
        given["seconds"] = min(given["seconds"], 10.0)
    run.conditions = Conditions(
        [] if given["url"] else models_of((*_SETS, *given["sets"])),
        CacheState.holding(0, 0, "warm by the load's own prompts when faults begin"),
        "each prompt once, to learn its answer",
        {"prompts, faults and their order": given["seed"]},
    )
    return Settings(
        given["seconds"],
        given["seed"],
        given["streams"],
        given["url"],
        given["api_key"],
        {name: command for name, _, command in pairs},
        given["sets"],
    )
