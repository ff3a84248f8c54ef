"""Nodes are replaced by nodes with other settings while they serve; a version that fails is rolled back."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from moonpool.client import Client, Reply
from moonpool.errors import ApiError
from moonpool.local.cluster import LocalCluster
from moonpool.runtime.service.child import Child
from tests.cluster.conftest import another, eventually, nodes, small_config, started

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 120, "ignore_eos": True}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalCluster]:
    config = small_config()
    config = replace(
        config,
        cluster=replace(config.cluster, prefill=1, decode=2),
        # One target that every request keeps, and one that only an answer all at once does; all are served.
        conductor=replace(config.conductor, slo_ttft_s=60.0, slo_tbt_s=1e-4, rejection="none"),
    )
    directory: Path = tmp_path_factory.mktemp("rollout")
    async with LocalCluster(config, directory=directory, restart=True, supervises=True) as running:
        yield running


def beside(cluster: LocalCluster, conductor: Child) -> Client:
    """A client of another conductor, which may do everything."""
    return Client(str(conductor.ready["url"]), security=cluster.client()._security)


async def answer(client: Client, number: int) -> str:
    reply = Reply()
    async for _ in client.complete(f"{number}. In the beginning", reply, **GREEDY):
        pass
    assert reply.usage["completion_tokens"] == GREEDY["max_tokens"]
    return reply.text


@asynccontextmanager
async def load(client: Client) -> AsyncIterator[None]:
    """Requests in three streams, with pauses that leave the machine time for what is tested; each answer must
    be as without a rollout."""
    expected = [await answer(client, number) for number in range(3)]
    ends, answered = asyncio.Event(), [0, 0, 0]

    async def stream(number: int) -> None:
        while not ends.is_set():
            assert await answer(client, number) == expected[number]
            answered[number] += 1
            await asyncio.sleep(0.2)

    streams = [asyncio.create_task(stream(number)) for number in range(3)]
    try:
        yield
    finally:
        ends.set()
        await asyncio.gather(*streams)
    assert all(answered)


async def finished(client: Client) -> dict[str, Any]:
    found: dict[str, Any] = {}

    async def ended() -> bool:
        nonlocal found
        found = await client.rollout_status()
        return found["state"] not in ("running", "rolling back")

    await eventually(ended, timeout_s=400)
    return found


async def supplied(client: Client) -> set[str]:
    return {
        node["node_id"] for node in (await client.fleet())["nodes"] if node["supplied"]["state"] == "running"
    }


async def test_all_nodes_are_replaced_under_load(cluster: LocalCluster) -> None:
    async with cluster.client() as client:
        async with load(client):
            began = await client.rollout(["engine.max_batch_size=24"], 1.0)
            assert began["state"] == "running"
            with pytest.raises(ApiError, match="a rollout runs"):
                await client.rollout(["engine.max_batch_size=8"], 1.0)
            found = await finished(client)
        assert (found["state"], found["reason"]) == ("done", "")
        assert {move["old"] for move in found["moves"]} == {"prefill-0", "decode-0", "decode-1"}
        assert all(move["state"] == "done" and move["probe_s"] > 0 for move in found["moves"])
        assert found["attained"]["ttft"] == 1.0
        assert found["attained"]["tbt"] < 0.1
        assert found["num_conductors"] == 1
        assert await supplied(client) == {"prefill-1", "decode-2", "decode-3"}
        options = [cluster.children[name]._command for name in ("prefill-1", "decode-2", "decode-3")]
        assert all("engine.max_batch_size=24" in command for command in options)
        (later,) = (await client.scale("prefill", 2))["started"]
        assert "engine.max_batch_size=24" in cluster.children[later]._command
        await client.drain(later)

        async def left() -> bool:
            return later not in cluster.children

        await eventually(left)


@pytest.mark.parametrize(
    ("setting", "why"),
    [("engine.block_size=32", "cannot serve beside"), ("model.path=/nowhere", "did not start")],
)
async def test_a_version_that_fails_is_rolled_back(cluster: LocalCluster, setting: str, why: str) -> None:
    async with cluster.client() as client:
        before = await supplied(client)
        async with load(client):
            await client.rollout([setting], 1.0)
            found = await finished(client)
        assert found["state"] == "rolled back"
        assert why in found["reason"]
        assert await supplied(client) == before
        assert set(await nodes(client)) >= before


async def test_an_aborted_rollout_takes_back_what_it_did(cluster: LocalCluster) -> None:
    async with cluster.client() as client:
        before = await supplied(client)
        async with load(client):
            await client.rollout(["engine.max_batch_size=16"], 1.0)

            async def second() -> bool:
                return len((await client.rollout_status())["moves"]) == 2

            await eventually(second, timeout_s=200)
            await client.abort_rollout()
            found = await finished(client)
        assert (found["state"], found["reason"]) == ("rolled back", "an operator aborted it")
        after = await supplied(client)
        assert len(after) == len(before)
        for name in after:
            assert "engine.max_batch_size=16" not in cluster.children[name]._command


async def test_what_cannot_be_rolled_out_is_refused(cluster: LocalCluster) -> None:
    async with cluster.client() as client:
        for settings in ([], ["node.id=x"], ["security.cluster_key=x"], ["engine"]):
            with pytest.raises(ApiError, match="a rollout"):
                await client.rollout(settings, 1.0)
        with pytest.raises(ApiError, match="no rollout runs"):
            await client.abort_rollout()


async def test_no_conductor_places_requests_on_a_node_that_is_watched(cluster: LocalCluster) -> None:
    second = another(cluster, "rollout-beside", "conductor", "conductor.leave_s=0")
    async with cluster.client() as client, started(second), beside(cluster, second) as other:
        await client.rollout(["engine.max_batch_size=20"], 3.0)
        num_checked = 0
        while (found := await client.rollout_status())["state"] == "running":
            watched = {move["new"] for move in found["moves"] if move["state"] == "watched"}
            for asked in (client, other):
                reply = Reply()
                async for _ in asked.complete("In the beginning", reply, **GREEDY | {"max_tokens": 4}):
                    pass
                summary = (await asked.timeline(reply.id))["summary"]
                known = await nodes(asked)
                for name in watched:
                    # Not one that has passed since.
                    if name in known and known[name]["state"] == "gated":
                        assert name not in (summary["prefill_node"], summary["decode_node"])
                        num_checked += 1
        assert found["state"] == "done", found
        assert num_checked >= 2 * len(found["moves"])

        async def all_open() -> bool:
            known = [await nodes(asked) for asked in (client, other)]
            return {one[move["new"]]["state"] for one in known for move in found["moves"]} == {"ready"}

        await eventually(all_open)


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
async def test_another_conductor_goes_on_with_a_rollout(cluster: LocalCluster, fault: signal.Signals) -> None:
    options = (
        "conductor.leave_s=0",
        "fleet.provider=local",
        f"fleet.supervisor={cluster.supervisor_address}",
    )
    runs = another(cluster, f"rollout-{fault.name}", "conductor", *options)
    size = {signal.SIGKILL: 28, signal.SIGSTOP: 30}[fault]
    async with cluster.client() as client:
        before = await supplied(client)
        async with load(client):
            await runs.start()
            try:
                await runs.wait_ready(60)
                async with beside(cluster, runs) as other:

                    async def sees_all() -> bool:
                        found = await nodes(other)
                        return all(found.get(name, {}).get("state") == "ready" for name in before)

                    await eventually(sees_all)
                    await other.rollout([f"engine.max_batch_size={size}"], 1.0)

                    async def second_is_watched() -> bool:
                        moves = (await client.rollout_status())["moves"]
                        return len(moves) == 2 and moves[1]["state"] == "watched"

                    await eventually(second_is_watched, timeout_s=200)
                    os.kill(runs.pid, fault)
                    found = await finished(client)
                assert (found["state"], found["reason"], found["num_conductors"]) == ("done", "", 2)
                after = await supplied(client)
                assert after == {move["new"] for move in found["moves"]}
                assert len(after) == len(before)
                if fault is signal.SIGSTOP:
                    os.kill(runs.pid, signal.SIGCONT)
                    async with beside(cluster, runs) as other:
                        # It knows that it was superseded, and changes nothing.
                        assert (await finished(other))["num_conductors"] == 2
            finally:
                runs.kill()
                await runs.wait()
        assert await supplied(client) == after
        for name in after:
            assert f"engine.max_batch_size={size}" in cluster.children[name]._command
