"""What a real cluster says it cost: the seconds of its nodes, divided among tenants, waste and idleness."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any

import aiohttp
import pytest

from moonpool.client import Client, Reply
from moonpool.local.cluster import LocalCluster
from tests.cluster.conftest import eventually


@pytest.fixture(scope="module")
def cluster(own_cluster: LocalCluster) -> LocalCluster:
    """Other modules call nodes without their conductor, which charges them to none."""
    return own_cluster


pytestmark = pytest.mark.asyncio(loop_scope="module")

# Heartbeats tell a node's totals, and requests their seconds at their ends: at rest both agree.
UNSETTLED_S, UNSETTLED_PART = 0.02, 0.001


async def usage(cluster: LocalCluster) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    async with aiohttp.ClientSession() as http, http.get(f"{cluster.url}/v1/usage") as answer:
        assert answer.status == 200, await answer.text()
        page = await answer.json()
        return page["data"], page["nodes"][0]


async def settles(cluster: LocalCluster) -> None:
    """No request runs any more: once all nodes have told of that, their seconds are all accounted for."""
    _, then = await usage(cluster)

    async def told() -> bool:
        _, nodes = await usage(cluster)
        return nodes["seconds"]["wall"] > then["seconds"]["wall"] + 2 * nodes["starts"]

    async def agree() -> bool:
        seconds = (await usage(cluster))[1]["seconds"]
        parts = seconds["useful"] + sum(seconds["wasted"].values()) + seconds["idle"]
        assert parts + seconds["unsettled"] == pytest.approx(seconds["wall"])
        return bool(parts == pytest.approx(seconds["wall"], rel=UNSETTLED_PART, abs=UNSETTLED_S))

    await eventually(told)
    # A node that the machine stops for a while tells later than the others.
    await eventually(agree, timeout_s=20)


async def test_useful_wasted_and_idle_seconds_are_the_walls(cluster: LocalCluster, client: Client) -> None:
    replies = [Reply() for _ in range(8)]

    async def ask(number: int) -> None:
        prompt = f"The {number}th question is asked twice. " * 12
        async for _ in client.complete(prompt, replies[number], max_tokens=24):
            pass

    await asyncio.gather(*map(ask, range(8)))
    timelines = [await client.timeline(reply.id) for reply in replies]
    for timeline in timelines:
        summary = timeline["summary"]
        assert 0 <= summary["wasted_s"] <= summary["node_s"] > 0
        # The price is 1 where none is configured.
        assert summary["cost"] == pytest.approx(summary["node_s"])
        assert sum(timeline["events"][-1]["node_s"].values()) == pytest.approx(summary["node_s"])
    of_requests = sum(timeline["summary"]["node_s"] for timeline in timelines)

    await settles(cluster)
    data, nodes = await usage(cluster)
    assert sum(row["cost"] for row in data) >= of_requests * 0.99
    assert nodes["starts"] >= 4
    assert nodes["cost"] == pytest.approx(nodes["seconds"]["wall"])
    assert nodes["seconds"]["useful"] > 0 < nodes["tokens_per_unit"]
    assert data[0]["output_tokens"] >= sum(timeline["summary"]["output_tokens"] for timeline in timelines) > 8
    assert data[0]["tenant"] == ""
    assert set(nodes["joules"]) == {"gpus", "processors"}


async def test_clients_that_leave_leave_no_second_out(cluster: LocalCluster, client: Client) -> None:
    async def leave(number: int) -> None:
        prompt = f"The {number}th is given up. " * 12
        async with aclosing(client.complete(prompt, Reply(), max_tokens=400)) as tokens:
            await anext(tokens)

    await asyncio.gather(*map(leave, range(6)))
    await settles(cluster)
