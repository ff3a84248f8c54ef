"""What it costs that stages are on several machines: two stages here, and over two rank hosts on loopback."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

from moonpool.bench.engine.driver import Session
from moonpool.bench.parallel import steps
from moonpool.engine.ranks.group import RankGroup
from moonpool.engine.ranks.hosts.listener import HostListener
from moonpool.engine.sharding.parallel_plan import ParallelPlan
from moonpool.runtime.config.options import ParallelOptions, TransferOptions
from moonpool.runtime.reports import report
from moonpool.runtime.reports.report import Row
from moonpool.runtime.service.child import Child

PLAN = ParallelPlan(pp=2)
NUM_HOSTS = 2


async def measure(model: Path, rounds: int) -> list[Row]:
    """Rows of ``PLAN``: on one machine, and beside them over two, whose link and relay are TCP on loopback.
    What the wire between machines adds to that is not in them."""
    _, alone = await steps.measure(model, ParallelPlan(), rounds, None, "cpu")
    async with steps.running(model, PLAN) as session:
        here, _ = await steps.measure_session(session, f"{PLAN}, one machine", PLAN, rounds, alone)
    async with _over_hosts(model) as session:
        name = f"{PLAN}, {NUM_HOSTS} machines on loopback"
        there, _ = await steps.measure_session(session, name, PLAN, rounds, alone)
    # The goals are those of the part that measures plans.
    here, there = ([replace(row, limit=None, limit_value=None) for row in rows] for rows in (here, there))
    return [*here, *_beside(here, there)]


def _beside(here: Sequence[Row], there: Sequence[Row]) -> list[Row]:
    """The latter, each with the figure of the former that it is compared with."""
    return [
        report.versus(replace(row, peer=None, ratio=None), "one machine", other.value) if other.value else row
        for row, other in zip(there, here, strict=True)
    ]


@asynccontextmanager
async def _over_hosts(model: Path) -> AsyncIterator[Session]:
    """An engine whose second stage runs under a rank host of its own."""
    timeout_s = ParallelOptions().timeout_s
    door = HostListener(NUM_HOSTS - 1, "127.0.0.1:0", "bench", timeout_s, TransferOptions())
    group = RankGroup(PLAN.world_size, timeout_s, door)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(group.close)
        starting = asyncio.create_task(group.start(threads=1))
        # It listens after its first step, and then waits for the other machines.
        await asyncio.sleep(0)
        leader = f"127.0.0.1:{door.port}"
        command = [sys.executable, "-m", "moonpool.engine.ranks.hosts.daemon", "--leader", leader]
        child = Child("rank host", [*command, "--set", "node.id=far"], None, speaks=True)
        await child.start()
        stack.push_async_callback(child.stop, timeout_s)
        await starting
        running = steps.running(model, PLAN, hosts=NUM_HOSTS, listen=leader, ranks=group)
        yield await stack.enter_async_context(running)
