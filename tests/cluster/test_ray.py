"""Nodes on a Ray cluster of three raylets on this machine: they start, serve, come back, move and leave."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio

from moonpool.client import Client, Reply
from moonpool.conductor.fleet.errors import ProviderFailed
from moonpool.conductor.fleet.providers.provider import FAILED, RUNNING
from moonpool.conductor.fleet.providers.ray import RayProvider
from moonpool.errors import ApiError
from moonpool.local.cluster import LocalCluster
from moonpool.runtime.config.options import FleetOptions
from tests.cluster.conftest import eventually, nodes, small_config

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(
    raylets: tuple[str, list[int]], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[LocalCluster]:
    config = small_config()
    config = replace(
        config,
        cluster=replace(config.cluster, prefill=1, decode=1),
        fleet=FleetOptions(provider="ray", ray=raylets[0]),
        index=replace(config.index, lease_ttl_s=10.0),
    )
    directory: Path = tmp_path_factory.mktemp("ray")
    async with LocalCluster(config, directory=directory) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def provider(cluster: LocalCluster) -> AsyncIterator[RayProvider]:
    """A third driver beside the conductor's and that of the cluster, to the same nodes."""
    made = RayProvider(cluster.config)
    yield made
    await made.close()


async def answer(client: Client, text: str) -> str:
    """The answer once there is one: a node that the machine starves is not there for a while."""
    texts: list[str] = []

    async def answered() -> bool:
        reply = Reply()
        try:
            async for _ in client.complete(text, reply, max_tokens=24, temperature=0):
                pass
        except ApiError as error:
            if error.status != 503:
                raise
            return False
        texts.append(reply.text)
        return True

    await eventually(answered, timeout_s=240)
    return texts[0]


async def by_role(client: Client, role: str) -> dict[str, Any]:
    (found,) = [one for one in (await nodes(client)).values() if one["role"] == role]
    return found


async def test_nodes_start_on_the_raylets_and_answer_exactly(
    cluster: LocalCluster, provider: RayProvider, shared_cluster: LocalCluster
) -> None:
    async with cluster.client() as client, shared_cluster.client() as beside:
        expected = await answer(beside, "In the beginning")
        assert len(expected) > 20
        assert await answer(client, "In the beginning") == expected
        found = await nodes(client)
        assert sorted(one["role"] for one in found.values()) == ["decode", "prefill"]
        assert {one.node_id: one.state for one in await provider.list()} == dict.fromkeys(found, RUNNING)
        for one in found.values():
            parents = psutil.Process(one["pid"]).parents()
            assert any("ray::" in parent.name() or "raylet" in parent.name() for parent in parents)


async def test_a_killed_node_is_started_again_by_ray(cluster: LocalCluster) -> None:
    async with cluster.client() as client:
        expected = await answer(client, "In the beginning")
        before = await by_role(client, "decode")
        os.kill(before["pid"], signal.SIGKILL)

        async def is_back() -> bool:
            found = (await nodes(client)).get(before["node_id"])
            return found is not None and found["state"] == "ready" and found["pid"] != before["pid"]

        await eventually(is_back, timeout_s=240)
        assert await answer(client, "In the beginning") == expected


async def test_operators_scale_and_a_node_that_is_stopped_leaves_nothing(
    cluster: LocalCluster, provider: RayProvider
) -> None:
    async with cluster.client() as client:
        (name,) = (await client.scale("decode", 2))["started"]

        async def joined() -> bool:
            found = (await nodes(client)).get(name)
            return found is not None and found["state"] == "ready"

        await eventually(joined, timeout_s=240)
        pid = (await nodes(client))[name]["pid"]
        assert name in {one.node_id for one in await provider.list()}
        await client.drain(name)

        async def left() -> bool:
            supplied = [one.node_id for one in await provider.list()]
            return name not in supplied and name not in await nodes(client) and not psutil.pid_exists(pid)

        await eventually(left, timeout_s=240)
        await provider.stop(name)  # idempotent


async def test_a_planner_of_an_older_epoch_is_refused(provider: RayProvider) -> None:
    before = {one.node_id for one in await provider.list()}

    async def asked() -> bool:
        try:
            await provider.stop("decode-unheard-of", fence=3)
        except ProviderFailed as error:
            if "timed out" not in str(error):  # Ray, while the machine starves it
                raise
            return False
        return True

    await eventually(asked, timeout_s=240)
    for call in (provider.start("decode", "", fence=2), provider.stop(min(before), fence=2)):
        with pytest.raises(ProviderFailed, match="a planner of epoch 2 asks, and one of epoch 3 has asked"):
            await call
    await provider.stop("decode-unheard-of", fence=3)
    await provider.stop("decode-unheard-of")  # an operator's

    async def all_run() -> bool:  # Ray takes one for failed while the machine starves it
        return {one.node_id for one in await provider.list() if one.state == RUNNING} == before

    await eventually(all_run, timeout_s=240)


async def test_a_node_that_fails_at_its_start_tells_why_and_leaves_others_alone(
    cluster: LocalCluster,
) -> None:
    async with cluster.client() as client:
        pids = [one["pid"] for one in (await nodes(client)).values()]
    bad = replace(cluster.config, cluster=replace(cluster.config.cluster, decode_options=("no.such=1",)))
    provider = RayProvider(bad)
    name = await provider.start("decode", "")

    async def failed() -> str:
        found = {one.node_id: one for one in await provider.list()}
        return found[name].reason if name in found and found[name].state == FAILED else ""

    await eventually(failed, timeout_s=240)
    assert "before it was ready" in await failed()
    await provider.close()
    assert all(psutil.pid_exists(pid) for pid in pids)


async def test_nodes_of_a_lost_raylet_move_to_another_or_say_that_there_is_no_room(
    cluster: LocalCluster, provider: RayProvider, raylets: tuple[str, list[int]]
) -> None:
    async with cluster.client() as client:
        expected = await answer(client, "In the beginning")
        before = {name: one["pid"] for name, one in (await nodes(client)).items()}
        children = {one.pid for one in psutil.Process(raylets[1][0]).children(recursive=True)}
        lost = {name for name, pid in before.items() if pid in children}
        psutil.Process(raylets[1][0]).kill()

        async def all_serve() -> bool:
            found = await nodes(client)
            moved = all(name in found and found[name]["pid"] != before[name] for name in lost)
            return moved and len(found) == 2 and all(one["state"] == "ready" for one in found.values())

        await eventually(all_serve, timeout_s=300)
        assert await answer(client, "In the beginning") == expected
        await provider.start("prefill", "")  # two cores are left, and have two nodes

        async def no_room() -> bool:
            return any("no room" in one.reason for one in await provider.list())

        await eventually(no_room, timeout_s=240)


async def test_the_end_of_a_cluster_leaves_no_actor_group_or_process(
    cluster: LocalCluster, provider: RayProvider
) -> None:
    async with cluster.client() as client:
        pids = [one["pid"] for one in (await nodes(client)).values()]
    await cluster.stop()

    async def nothing() -> bool:
        return not any(psutil.pid_exists(pid) for pid in pids) and not await provider.list()

    await eventually(nothing, timeout_s=120)
    assert await provider._call("groups", lambda ray: ray._groups()) == []
