"""Nodes that operators start and stop in a running cluster, through the API, by the local provider."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
import pytest_asyncio

from moonpool.client import Client, Reply
from moonpool.kvstore.index.redis.node_record import JOIN_PHASES
from moonpool.local.cluster import LocalCluster
from moonpool.protos import fleet_pb2, fleet_pb2_grpc
from tests.cluster.conftest import channel_as, eventually, nodes, small_config

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalCluster]:
    config = small_config()
    config = replace(config, cluster=replace(config.cluster, prefill=1, decode=1))
    directory: Path = tmp_path_factory.mktemp("fleet")
    async with LocalCluster(config, directory=directory, restart=True, supervises=True) as running:
        yield running


async def supplied(client: Client) -> dict[str, dict[str, Any]]:
    return {node["node_id"]: node["supplied"] for node in (await client.fleet())["nodes"]}


async def answer(client: Client, text: str) -> str:
    reply = Reply()
    async for _ in client.complete(text, reply, max_tokens=24, temperature=0):
        pass
    return reply.text


async def says_how_it_joined(client: Client, name: str) -> None:
    """A node that serves says how long each phase of its start took."""

    async def knows_all() -> bool:  # its registration ends after its record was written
        return (await nodes(client))[name]["join"].keys() == set(JOIN_PHASES)

    await eventually(knows_all)
    node = (await nodes(client))[name]
    assert node["join"]["process"] > 0
    until_ready_s = sum(node["join"][phase] for phase in ("weights", "warm_up", "services"))
    # Each is rounded to a millisecond.
    assert until_ready_s == pytest.approx(node["join_s"], abs=0.1)


async def test_nodes_start_serve_drain_and_stay_away(cluster: LocalCluster) -> None:
    async with cluster.client() as client:
        expected = await answer(client, "In the beginning")
        assert (await client.scale("decode", 2))["started"] == ["decode-1"]

        async def joined() -> bool:
            found = (await nodes(client)).get("decode-1")
            if found is None or found["state"] != "ready":
                return False
            return bool((await supplied(client))["decode-1"]["state"] == "running")

        await eventually(joined)
        await says_how_it_joined(client, "decode-1")
        streams = [asyncio.create_task(answer(client, "In the beginning")) for _ in range(6)]
        await client.drain("decode-0")
        await client.drain("decode-0")  # idempotent
        assert set(await asyncio.gather(*streams)) == {expected}

        async def left() -> bool:
            return "decode-0" not in await nodes(client) and "decode-0" not in await supplied(client)

        await eventually(left)
        assert "decode-0" not in cluster.children  # nothing starts it again
        assert await answer(client, "In the beginning") == expected
        assert (await nodes(client))["decode-1"]["first_token_s"] > 0
        events = {(one["kind"], one["node"]) for one in (await anext(client.live()))["events"]}
        assert {("started", "decode-1"), ("drained", "decode-0")} <= events


async def test_a_node_that_an_operator_switches_serves_its_new_role(cluster: LocalCluster) -> None:
    async with cluster.client() as client:
        expected = await answer(client, "And God said")
        (name,) = (await client.scale("decode", 2))["started"]

        async def is_now(role: str) -> bool:
            found = (await nodes(client)).get(name)
            return found is not None and (found["state"], found["role"]) == ("ready", role)

        await eventually(lambda: is_now("decode"))
        streams = [asyncio.create_task(answer(client, "And God said")) for _ in range(6)]
        done = await client.switch(name, "prefill")
        assert (done["former"], done["role"]) == ("decode", "prefill")
        await eventually(lambda: is_now("prefill"))
        assert set(await asyncio.gather(*streams)) == {expected}
        # The provider's count of prefill nodes has it, whatever its name.
        assert (await client.scale("prefill", 2))["started"] == []
        assert await answer(client, "And God said") == expected
        await client.drain(name)

        async def left() -> bool:
            return name not in await supplied(client)

        await eventually(left)


async def test_a_node_that_fails_at_its_start_is_told_and_not_repeated(cluster: LocalCluster) -> None:
    file = cluster.directory / "cluster.toml"
    before = file.read_text()
    try:
        file.write_text(before + "\n[nothing]\nis = 1\n")
        async with cluster.client() as client:
            (name,) = (await client.scale("prefill", 2))["started"]

            async def failed() -> bool:
                found = (await supplied(client)).get(name)
                return found is not None and found["state"] == "failed"

            await eventually(failed)
            assert "before it was ready" in (await supplied(client))[name]["reason"]
            assert name not in cluster.children
    finally:
        file.write_text(before)


@pytest.mark.parametrize("role", ["node", "client", ""])
async def test_only_conductors_and_operators_reach_the_supervisor(cluster: LocalCluster, role: str) -> None:
    address = cluster.supervisor_address
    channel = channel_as(role, cluster, address) if role else grpc.aio.insecure_channel(address)
    before = set(cluster.children)
    async with channel:
        stub = fleet_pb2_grpc.SupervisorStub(channel)
        for call, request in (
            (stub.Start, fleet_pb2.StartNodeRequest(role="decode")),
            (stub.Stop, fleet_pb2.StopNodeRequest(node_id="prefill-0")),
            (stub.Switch, fleet_pb2.SwitchNodeRequest(node_id="prefill-0")),
            (stub.List, fleet_pb2.ListNodesRequest()),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call(request, timeout=20)
            expected = "PERMISSION_DENIED" if role else "UNAUTHENTICATED"
            assert refused.value.code().name == expected
    assert set(cluster.children) == before


async def test_the_supervisor_starts_nothing_that_it_does_not_know(cluster: LocalCluster) -> None:
    async with channel_as("operator", cluster, cluster.supervisor_address) as channel:
        stub = fleet_pb2_grpc.SupervisorStub(channel)
        for call, request, status in (
            (stub.Start, fleet_pb2.StartNodeRequest(role="conductor"), "INVALID_ARGUMENT"),
            (stub.Start, fleet_pb2.StartNodeRequest(role="decode", model="x"), "FAILED_PRECONDITION"),
            (stub.Stop, fleet_pb2.StopNodeRequest(node_id="conductor"), "NOT_FOUND"),
            (stub.Stop, fleet_pb2.StopNodeRequest(node_id="redis"), "NOT_FOUND"),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call(request, timeout=20)
            assert refused.value.code().name == status
