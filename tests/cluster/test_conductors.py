"""Two conductors in front of one cluster, one of which dies."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from moonpool.client import Client, Reply
from moonpool.errors import ApiError
from moonpool.local.cluster import LocalCluster
from moonpool.runtime.service.child import Child
from tests.cluster.conftest import another, eventually, started

pytestmark = pytest.mark.asyncio(loop_scope="module")

# What a busy machine takes beside a bound.
BUSY_S = 30.0
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 600, "ignore_eos": True}


@pytest_asyncio.fixture(loop_scope="module")
async def second(cluster: LocalCluster) -> AsyncIterator[Child]:
    """Another conductor on the same Redis, which sees all nodes."""
    child = another(cluster, "conductor-2", "conductor")
    await child.start()
    await child.wait_ready(60)
    async with Client(str(child.ready["url"])) as client:

        async def sees_all() -> bool:
            nodes = (await client.cluster())["nodes"]
            return [node["state"] for node in nodes] == ["ready"] * len(cluster.nodes)

        await eventually(sees_all)
    yield child
    await child.stop(10)


async def test_a_killed_conductor_takes_only_its_own_requests_along(
    cluster: LocalCluster, client: Client, second: Child
) -> None:
    async def facts() -> dict[str, Any]:
        return await client.cluster()

    async def knows_of_it() -> bool:
        return bool((await facts())["num_other_conductors"] == 1)

    await eventually(knows_of_it)
    expected = Reply()
    async for _ in client.complete("And it came to pass", expected, **GREEDY):
        pass

    async with Client(str(second.ready["url"])) as other:
        doomed = [
            other.complete(f"Of the kings {i}", Reply(), **GREEDY | {"max_tokens": 4000}, stream_options=None)
            for i in range(4)
        ]
        await asyncio.gather(*(anext(stream) for stream in doomed))
        killed = False
        # On a busy machine an answer may arrive in few pieces: then another one.
        for _ in range(5):
            survivor = Reply()
            async for _ in client.complete("And it came to pass", survivor, **GREEDY):
                if not killed and len(survivor.pieces_s) >= 20:
                    second.kill()
                    killed = True
            assert survivor.text == expected.text
            if killed:
                break
        assert killed
        for stream in doomed:
            with pytest.raises(ApiError):
                async for _ in stream:
                    pass

    async def idle() -> bool:
        seen = await facts()
        loads = [node["load"] for node in seen["nodes"]]
        return seen["num_other_conductors"] == 0 and all(
            load["num_running"] == load["num_waiting"] == 0 and load["num_free_blocks"] == load["num_blocks"]
            for load in loads
        )

    # Nobody tells the nodes: they find out by themselves, within the bound that is set for it.
    await eventually(idle, timeout_s=BUSY_S + cluster.config.node.orphan_s + cluster.config.store.lease_ttl_s)


async def test_a_small_conductor_serves_large_requests_in_turn_and_leaves_in_order(
    cluster: LocalCluster,
) -> None:
    small = another(
        cluster, "conductor-small", "conductor", "conductor.max_requests=2", "conductor.leave_s=4"
    )
    async with started(small), aiohttp.ClientSession() as http:
        url = str(small.ready["url"])

        async def serves() -> bool:
            async with http.get(f"{url}/readyz") as response:
                return response.status == 200

        async def leaves() -> bool:
            return not await serves()

        await eventually(serves)
        body = {"prompt": ["In the beginning", "And it came", "Of the"], "n": 2, "max_tokens": 4}
        async with http.post(f"{url}/v1/completions", json=body) as response:
            assert response.status == 200, await response.text()
            assert len((await response.json())["choices"]) == 6

        small.terminate()
        await eventually(leaves)
        async with aiohttp.ClientSession() as fresh, fresh.post(f"{url}/v1/completions", json=body) as late:
            assert late.status == 200, "the load balancer has not noticed yet"
        assert await asyncio.wait_for(small.wait(), 60) == 0
