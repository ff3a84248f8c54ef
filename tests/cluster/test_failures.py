"""Nodes and Redis die by kill -9, and nobody who streams notices more than a pause."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from typing import Any

import aiohttp
import pytest

from moonpool.client import Client, Reply
from moonpool.errors import ApiError
from moonpool.local.cluster import LocalCluster
from tests.cluster.conftest import all_ready, eventually, kill

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def cluster(own_cluster: LocalCluster) -> LocalCluster:
    return own_cluster


NUM_TOKENS = 600
GREEDY: dict[str, Any] = {
    "temperature": 0,
    "max_tokens": NUM_TOKENS,
    "ignore_eos": True,
}


async def whole(client: Client, prompt: str, reply: Reply | None = None, **parameters: Any) -> str:
    reply = reply or Reply()
    async for _ in client.complete(prompt, reply, **{**GREEDY, **parameters}):
        pass
    assert reply.usage["completion_tokens"] == parameters.get("max_tokens", NUM_TOKENS)
    return reply.text


async def node_of(client: Client, request_id: str, role: str) -> str:
    return str((await client.timeline(request_id))["summary"][f"{role}_node"])


@pytest.mark.parametrize("role", ["decode", "prefill"])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.9, "seed": 7}], ids=["greedy", "seeded"])
async def test_a_killed_node_costs_no_token(
    cluster: LocalCluster, client: Client, role: str, sampling: dict[str, Any]
) -> None:
    prompt = f"And the {role} said unto him "
    expected = await whole(client, prompt, **sampling)
    # On a busy machine the request may arrive in few pieces, or have ended before its node was killed: then
    # once more.
    for _ in range(5):
        reply = Reply()
        killed = ""
        killed_unix_s = 0.0
        async for _ in client.complete(prompt, reply, **{**GREEDY, **sampling}):
            if not killed and len(reply.pieces_s) >= 20:
                killed = await node_of(client, reply.id, role)
                kill(cluster, killed)
                assert await cluster.children[killed].wait() == -signal.SIGKILL
                killed_unix_s = time.time()
        assert reply.text == expected
        assert reply.usage["completion_tokens"] == NUM_TOKENS
        if not killed:
            continue
        events = {event["event"]: event for event in (await client.timeline(reply.id))["events"]}
        await cluster.restart(killed)
        await eventually(lambda: all_ready(cluster, client))
        if events["done"]["unix_s"] > killed_unix_s:
            # A prefill node has nothing to do with a request that another node decodes.
            assert ("retry" in events) == (role == "decode")
            return
    pytest.fail("five times the request had ended before its node was killed")


async def test_a_prefill_node_killed_while_it_computes(cluster: LocalCluster, client: Client) -> None:
    async def busy() -> str:
        for node in (await client.cluster())["nodes"]:
            if node["role"] == "prefill" and node["load"]["own_prefills"]:
                return str(node["node_id"])
        return ""

    # On a busy machine the prompt may be computed before its node is killed: then another one.
    for number in range(5):
        prompt = f"{number}. " + "The words of the preacher, the son of David. " * 300
        reply = Reply()
        task = asyncio.create_task(whole(client, prompt, reply, max_tokens=32))
        victim = ""
        while not victim and not task.done():
            victim = await busy()
        if victim:
            kill(cluster, victim)
        text = await task
        if victim:
            assert await cluster.children[victim].wait() == -signal.SIGKILL
            await cluster.restart(victim)
            await eventually(lambda: all_ready(cluster, client))
        events = [event["event"] for event in (await client.timeline(reply.id))["events"]]
        assert text == await whole(client, prompt, max_tokens=32)
        if "retry" in events:
            # It was placed again before its first token.
            assert events.index("retry") < events.index("first_token")
            return
    pytest.fail("five times no prefill node was killed while it computed")


@pytest.mark.slow
async def test_with_no_decode_node_left_the_stream_ends_with_an_error(
    cluster: LocalCluster, client: Client
) -> None:
    reply = Reply()
    with pytest.raises(ApiError, match="decode"):
        async for _ in client.complete("There was a man", reply, **GREEDY | {"max_tokens": 4000}):
            if len(reply.pieces_s) == 10:  # of so many that it is not at its end before it is read this far
                kill(cluster, "decode-0")
                kill(cluster, "decode-1")
    assert len(reply.pieces_s) >= 10
    for name in ("decode-0", "decode-1"):
        await cluster.children[name].wait()
        await cluster.restart(name)
    await eventually(lambda: all_ready(cluster, client))
    await whole(client, "There was a man")


@pytest.mark.slow
async def test_redis_killed_and_back(cluster: LocalCluster, client: Client) -> None:
    async def ready() -> dict[str, Any]:
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"{cluster.url}/readyz") as response,
        ):
            assert response.status == 200
            answer: dict[str, Any] = await response.json()
            return answer

    async def degraded() -> bool:
        return bool((await ready()).get("degraded"))

    async def healthy() -> bool:
        return not (await ready()).get("degraded")

    expected = await whole(client, "Blessed is the man")
    reply = Reply()
    async for _ in client.complete("Blessed is the man", reply, **GREEDY):
        if len(reply.pieces_s) == 10:
            kill(cluster, "redis")
    assert reply.text == expected
    await eventually(degraded)
    # Longer than the nodes' leases: without Redis nobody may be dropped for a lapsed one.
    await asyncio.sleep(2 * cluster.config.index.lease_ttl_s)
    assert await whole(client, "Blessed is the man") == expected
    await cluster.children["redis"].wait()
    await cluster.restart("redis")
    await eventually(healthy)
    await eventually(lambda: all_ready(cluster, client))

    # Publishing has resumed: what is computed now is known to the conductor afterwards.
    prompt = "And God said, Let there be light: and there was light. " * 4
    await whole(client, prompt, max_tokens=4)

    async def hit() -> bool:
        again = Reply()
        async for _ in client.complete(prompt, again, max_tokens=1, temperature=0):
            pass
        return bool(again.usage["prompt_tokens_details"]["cached_tokens"] > 0)

    await eventually(hit)


async def test_a_node_that_comes_back_has_a_new_epoch_and_an_empty_cache(
    cluster: LocalCluster, client: Client
) -> None:
    async def epoch() -> int:
        nodes = (await client.cluster())["nodes"]
        return next((int(node["epoch"]) for node in nodes if node["node_id"] == "decode-1"), 0)

    before = await epoch()
    kill(cluster, "decode-1")
    await cluster.children["decode-1"].wait()
    await cluster.restart("decode-1")
    await eventually(lambda: all_ready(cluster, client))
    assert await epoch() > before
    node = next(n for n in (await client.cluster())["nodes"] if n["node_id"] == "decode-1")
    assert node["num_index_blocks"] == 0


async def test_sigterm_drains(cluster: LocalCluster, client: Client) -> None:
    name = ""
    # On a busy machine a request may arrive in few pieces: then another one.
    for _ in range(5):
        reply = Reply()
        async for _ in client.complete("And Moses said", reply, **GREEDY):
            if not name and len(reply.pieces_s) >= 10:
                name = await node_of(client, reply.id, "decode")
                os.kill(cluster.children[name].pid, signal.SIGTERM)
        assert reply.usage["completion_tokens"] == NUM_TOKENS
        if name:
            break
    assert name
    events = [event["event"] for event in (await client.timeline(reply.id))["events"]]
    assert "retry" not in events  # it finished where it was
    assert await cluster.children[name].wait() == 0
    await cluster.restart(name)
    await eventually(lambda: all_ready(cluster, client))


async def test_a_node_that_drains_waits_for_a_conductor_that_stands_still(
    cluster: LocalCluster, client: Client
) -> None:
    """The node has computed all tokens before the conductor reads the next one."""
    conductor, waited = cluster.children["conductor"].pid, False
    # On a busy machine all tokens may have come before the conductor is stopped: then once more.
    for _ in range(5):
        reply, name = Reply(), ""
        # Of so many that they do not fit between node and conductor.
        async for _ in client.complete("And Moses said", reply, **GREEDY | {"max_tokens": 400}):
            if not name and len(reply.pieces_s) >= 2:
                name = await node_of(client, reply.id, "decode")
                os.kill(conductor, signal.SIGSTOP)
                try:
                    os.kill(cluster.children[name].pid, signal.SIGTERM)
                    ended = asyncio.ensure_future(cluster.children[name].wait())
                    waited = not (await asyncio.wait({ended}, timeout=1.5))[0]
                finally:
                    os.kill(conductor, signal.SIGCONT)
        assert reply.usage["completion_tokens"] == 400
        if not name:
            continue
        assert await ended == 0
        await cluster.restart(name)
        await eventually(lambda: all_ready(cluster, client))
        if waited:
            assert "retry" not in [one["event"] for one in (await client.timeline(reply.id))["events"]]
            return
    pytest.fail("no node waited for the conductor")
