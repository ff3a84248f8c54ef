"""Planners of a real cluster: nodes come with a burst and go after it, and no planner's end changes that."""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import signal
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from moonpool.client import Client, Reply
from moonpool.local.cluster import LocalCluster
from moonpool.runtime.service.child import Child
from tests.cluster.conftest import another, eventually, nodes, small_config, started

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.asyncio(loop_scope="module")]

LEASE_S = 6.0  # a node of a busy machine that loses it would be replaced by one more
BUSY_S = 20.0  # what a busy machine takes beside a bound
STREAMS = 48  # at once: enough to keep a prefill node busy
PROMPT = "And it came to pass in those days that the word of the LORD came. " * 40
TWO_TOKENS: dict[str, Any] = {"max_tokens": 2, "ignore_eos": True}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalCluster]:
    """Its own conductor does not plan."""
    config = small_config()
    config = replace(
        config,
        cluster=replace(config.cluster, prefill=1, decode=1),
        conductor=replace(config.conductor, request_timeout_s=300.0, rejection="none"),
        index=replace(config.index, lease_ttl_s=LEASE_S),
    )
    directory: Path = tmp_path_factory.mktemp("planner")
    async with LocalCluster(config, directory=directory, restart=True, supervises=True) as running:
        yield running


@asynccontextmanager
async def planners(
    cluster: LocalCluster, operator: Client, *options: str
) -> AsyncIterator[dict[str, tuple[Child, Client]]]:
    """Two conductors that may change the fleet, by their ids."""
    options = (
        *("conductor.leave_s=0", "planner.mode=act", "planner.spare=0", "planner.hold_s=2"),
        "planner.decode_most=1",
        *("fleet.provider=local", f"fleet.supervisor={cluster.supervisor_address}", *options),
    )
    children = [another(cluster, f"planner-{i}", "conductor", *options) for i in range(2)]
    async with started(*children), AsyncExitStack() as stack:
        found = {}
        for child in children:
            client = Client(str(child.ready["url"]), security=operator._security)
            await stack.enter_async_context(client)
            found[(await client.cluster())["conductor_id"]] = (child, client)
        yield found


async def leader(made: Mapping[str, tuple[Child, Client]], but: str = "") -> str:
    """The id of the planner that has the lease, once one has it that is not ``but``."""
    leads: list[str] = []

    async def is_there() -> bool:
        for name, (_, client) in made.items():
            if name != but and (await client.fleet())["planner"]["state"].startswith("plans"):
                leads.append(name)
        return bool(leads)

    await eventually(is_there)
    return leads[0]


async def supplied(client: Client, role: str) -> set[str]:
    """The nodes of a role that serve, or will."""
    return {
        one["node_id"]
        for one in (await client.fleet())["nodes"]
        if one["role"] == role and one["supplied"] and one["supplied"]["state"] in ("starting", "running")
    }


async def serve(client: Client, count: int) -> bool:
    """Whether so many prefill nodes do, and no other one is on its way."""
    ready = {
        name
        for name, one in (await nodes(client)).items()
        if (one["role"], one["state"]) == ("prefill", "ready")
    }
    return len(ready) == count and ready == await supplied(client, "prefill")


async def plans(client: Client) -> list[str]:
    return [one["text"] for one in (await anext(client.live()))["events"] if one["kind"] == "plan"]


async def test_a_burst_brings_a_node_and_the_next_planner_takes_it_away(cluster: LocalCluster) -> None:
    numbers, enough = itertools.count(), asyncio.Event()

    async def ask(client: Client) -> None:
        while not enough.is_set():
            reply = Reply()
            async for _ in client.complete(
                f"{next(numbers)}. {PROMPT}", reply, max_tokens=2, ignore_eos=True
            ):
                pass
            assert reply.usage["completion_tokens"] == 2

    async with cluster.client() as client, planners(cluster, client, "planner.prefill_most=2") as made:
        first = await leader(made)
        child, leads = made[first]
        async with asyncio.TaskGroup() as streams:
            for _ in range(STREAMS):
                streams.create_task(ask(client))
            await eventually(lambda: serve(client, 2), timeout_s=200)
            (added,) = await plans(leads)
            assert re.match(r"add a prefill node: \d+ needed: .* compute on average", added)
            # A planner that is gone takes no decision along: the next one sees the same fleet and demand.
            child.kill()
            second = await leader(made, but=first)
            assert await supplied(client, "prefill") == {"prefill-0", "prefill-1"}
            enough.set()
        await eventually(lambda: serve(client, 1), timeout_s=200)
        removed = (await plans(made[second][1]))[-1]
        assert removed.startswith("remove prefill-")
        assert "were enough for the last 2 s" in removed


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
async def test_a_planner_that_is_gone_midway_is_followed_by_one_that_asks_for_the_rest(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch, fault: signal.Signals
) -> None:
    asked: list[str] = []
    start_node = cluster._elastic.start_node
    gone = asyncio.Event()

    async with cluster.client() as client, planners(cluster, client, "planner.prefill_least=2") as made:
        await eventually(lambda: serve(client, 2), timeout_s=120)
        first = await leader(made)
        child, _ = made[first]

        async def start(role: str, *arguments: Any) -> str:
            """The planner that asks first does not get its answer."""
            asked.append(await start_node(role, *arguments))
            if len(asked) == 1:
                os.kill(child.pid, fault)
                gone.set()
            return asked[-1]

        monkeypatch.setattr(cluster._elastic, "start_node", start)
        before = await supplied(client, "prefill")
        await asyncio.gather(*(client.drain(name) for name in before))
        async with asyncio.timeout(BUSY_S):
            await gone.wait()
        began_s = time.monotonic()
        second = await leader(made, but=first)
        assert time.monotonic() - began_s < LEASE_S + BUSY_S
        await eventually(lambda: serve(client, 2), timeout_s=120)
        assert await supplied(client, "prefill") == set(asked)
        assert len(asked) == 2
        if fault is signal.SIGSTOP:
            os.kill(child.pid, signal.SIGCONT)

            async def knows() -> bool:
                return bool((await made[first][1].fleet())["planner"]["state"] == f"{second} plans")

            await eventually(knows)
            assert await supplied(client, "prefill") == set(asked)
    # For the next test.
    async with cluster.client() as client:
        await client.scale("prefill", 1)
        await eventually(lambda: serve(client, 1), timeout_s=120)
