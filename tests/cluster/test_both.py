"""Nodes that prefill and decode: the tokens are the same, nothing is copied, and a death costs no token."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import grpc.aio
import pytest
import pytest_asyncio

from moonpool.client import Client, Reply
from moonpool.local.cluster import LocalCluster
from moonpool.protos import node_pb2, node_pb2_grpc
from moonpool.runtime import rpc
from moonpool.runtime.errors import RemoteError
from tests.cluster.conftest import channel_as, complete_and_move, eventually, kill, nodes, small_config

pytestmark = pytest.mark.asyncio(loop_scope="module")

NUM_TOKENS = 200
PROMPT = "And it came to pass in those days that the word of the LORD came unto "
# Of so many tokens that the request has not ended when something has been done with it.
LONG: dict[str, Any] = {"max_tokens": 600, "ignore_eos": True, "temperature": 0}
SAMPLINGS: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 0.9, "seed": 7}]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def colocated(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalCluster]:
    config = small_config()
    config = replace(config, cluster=replace(config.cluster, prefill=0, decode=0, both=2))
    async with LocalCluster(config, directory=tmp_path_factory.mktemp("both")) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def both(colocated: LocalCluster) -> AsyncIterator[Client]:
    async with Client(colocated.url) as connected:
        yield connected


async def whole(client: Client, prompt: str, reply: Reply | None = None, **sampling: Any) -> str:
    reply = reply or Reply()
    async for _ in client.complete(prompt, reply, max_tokens=NUM_TOKENS, ignore_eos=True, **sampling):
        pass
    assert reply.usage["completion_tokens"] == NUM_TOKENS
    return reply.text


async def idle(client: Client) -> bool:
    loads = [node["load"] for node in (await client.cluster())["nodes"]]
    return all(
        load["num_running"] == load["num_waiting"] == 0
        and load["num_free_blocks"] == load["num_blocks"]
        and load["own_prefills"] == load["own_decodes"] == 0
        for load in loads
    )


@pytest.mark.slow
async def test_a_request_alone_stays_on_one_node(both: Client) -> None:
    """Where one node seemed slow at prompts and the other at decoding, two are better until that has faded:
    half of it every minute."""

    async def stays() -> bool:
        # Two at once, so that both nodes are measured: a node that seemed slow while it started gets no
        # request of its own otherwise, and so stays slow in the estimates.
        pair = (PROMPT + "the first", PROMPT + "the second")
        await asyncio.gather(*(whole(both, prompt, temperature=0) for prompt in pair))
        alone = Reply()
        await whole(both, PROMPT + "the idle", alone, temperature=0)
        summary = (await both.timeline(alone.id))["summary"]
        return bool(summary["path"] == "whole" and summary["transferred_nbytes"] == 0)

    await eventually(stays, timeout_s=200)


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "seeded"])
async def test_one_node_and_two_give_the_same_tokens(
    client: Client, both: Client, sampling: dict[str, Any]
) -> None:
    """``client`` is one of a cluster of prefill and decode nodes."""
    replies = [Reply() for _ in range(6)]
    prompts = [PROMPT * (1 + number) + str(number) for number in range(len(replies))]
    answers = await asyncio.gather(
        *(whole(both, prompt, reply, **sampling) for prompt, reply in zip(prompts, replies, strict=True))
    )
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer == await whole(client, prompt, **sampling)
    for reply in replies:
        summary = (await both.timeline(reply.id))["summary"]
        if summary["path"] == "whole":
            assert summary["prefill_node"] == summary["decode_node"]
            assert summary["transferred_nbytes"] == 0
    await eventually(lambda: idle(both))


async def test_the_next_turn_finds_all_blocks_of_the_one_before(both: Client) -> None:
    first = Reply()
    text = await whole(both, PROMPT, first, temperature=0)

    async def hit() -> bool:
        second = Reply()
        await whole(both, PROMPT + text + " And he said", second, temperature=0)
        cached = second.usage["prompt_tokens_details"]["cached_tokens"]
        return bool(cached > first.usage["prompt_tokens"] + NUM_TOKENS // 2)

    await eventually(hit)


async def test_a_request_that_is_given_up_frees_every_block(both: Client) -> None:
    for num_pieces in (1, 2, 40):
        stream = both.complete(PROMPT, Reply(), max_tokens=4000, ignore_eos=True)
        for _ in range(num_pieces):
            await anext(stream)
        await stream.aclose()
    await eventually(lambda: idle(both))


@pytest.mark.slow
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "seeded"])
@pytest.mark.parametrize("end", ["kill", "drain"])
async def test_a_node_that_ends_costs_no_token(
    colocated: LocalCluster, both: Client, end: str, sampling: dict[str, Any]
) -> None:
    """A killed one is replaced; a drained one finishes what it has."""
    expected = await whole(both, PROMPT, **sampling)
    reply, victim = Reply(), ""
    async for _ in both.complete(PROMPT, reply, max_tokens=NUM_TOKENS, ignore_eos=True, **sampling):
        if not victim and len(reply.pieces_s) >= 10:
            victim = (await both.timeline(reply.id))["summary"]["decode_node"]
            if end == "kill":
                kill(colocated, victim)
            else:
                colocated.children[victim].terminate()
    assert reply.text == expected
    assert reply.usage["completion_tokens"] == NUM_TOKENS
    await colocated.children[victim].wait()
    other = Reply()
    assert await whole(both, PROMPT, other, **sampling) == expected
    assert (await both.timeline(other.id))["summary"]["decode_node"] != victim
    await colocated.restart(victim)

    async def back() -> bool:
        nodes = {node["node_id"]: node for node in (await both.cluster())["nodes"]}
        return victim in nodes and nodes[victim]["pid"] == colocated.children[victim].ready["pid"]

    await eventually(back)


async def switch(cluster: LocalCluster, client: Client, name: str, role: str, limit_s: float = 60.0) -> int:
    """As an operator. Returns the requests of its former stage that are left."""
    address = (await nodes(client))[name]["rpc_address"]
    async with channel_as("operator", cluster, address) as channel:
        request = node_pb2.SwitchRequest(role=role, limit_s=limit_s)
        with rpc.node_errors(name):
            reply = await node_pb2_grpc.RolesStub(channel).Switch(request, timeout=limit_s + 20)

    async def known() -> bool:
        return bool((await nodes(client))[name]["role"] == role)

    await eventually(known)
    return int(reply.num_left)


async def test_a_request_moves_to_and_fro(both: Client) -> None:
    """It follows the same request on a node that served its prefill, and comes back to its own blocks."""
    expected = Reply()
    async for _ in both.complete(PROMPT, expected, **LONG):
        pass
    reply, moves = await complete_and_move(both, PROMPT, 2, **LONG)
    assert reply.text == expected.text
    assert [one["target"] for one in moves] == [one["source"] for one in reversed(moves)]
    await eventually(lambda: idle(both))


@pytest.mark.slow
async def test_tokens_stay_exact_while_roles_change_under_load(colocated: LocalCluster, both: Client) -> None:
    """Cache and index entries are kept, and the node keeps its life."""
    prompts = [PROMPT * (1 + number % 4) + str(number) for number in range(8)]
    expected = [await whole(both, prompt, temperature=0) for prompt in prompts]
    before = await nodes(both)
    stopped = asyncio.Event()
    num_done = 0

    async def ask(prompt: str, answer: str) -> None:
        nonlocal num_done
        while not stopped.is_set():
            assert await whole(both, prompt, temperature=0) == answer
            num_done += 1

    async with asyncio.TaskGroup() as group:
        for pair in zip(prompts, expected, strict=True):
            group.create_task(ask(*pair))
        plan = [("both-0", "prefill"), ("both-1", "decode"), ("both-0", "both"), ("both-1", "prefill")]
        for name, role in [*plan, ("both-0", "decode"), ("both-1", "both"), ("both-0", "both")]:
            done = num_done
            assert await switch(colocated, both, name, role) == 0
            while num_done < done + 8:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        stopped.set()
    after = await nodes(both)
    for name, node in before.items():
        assert node["epoch"] == after[name]["epoch"]
        assert after[name]["num_index_blocks"] >= node["num_index_blocks"]
    await eventually(lambda: idle(both))


async def test_an_idle_node_changes_its_role_within_a_second(colocated: LocalCluster, both: Client) -> None:
    first = Reply()
    expected = await whole(both, PROMPT, first, temperature=0)
    await eventually(lambda: idle(both))
    for name, role in (("both-0", "prefill"), ("both-1", "decode")):
        # A machine that stands still for a while has five tries.
        for _ in range(5):
            began_s = time.monotonic()
            assert await switch(colocated, both, name, role) == 0
            took_s = time.monotonic() - began_s
            if took_s < 1.0:
                break
            assert await switch(colocated, both, name, "both") == 0
        assert took_s < 1.0
    reply = Reply()
    assert await whole(both, "A new one. " + PROMPT * 8, reply, temperature=0)
    summary = (await both.timeline(reply.id))["summary"]
    assert (summary["path"], summary["prefill_node"], summary["decode_node"]) == ("split", "both-0", "both-1")
    assert await whole(both, PROMPT, temperature=0) == expected
    for name in ("both-0", "both-1"):
        assert await switch(colocated, both, name, "both") == 0


async def test_an_unknown_role_and_a_stranger_change_nothing(colocated: LocalCluster, both: Client) -> None:
    with pytest.raises(RemoteError, match="cannot have the role 'store'"):
        await switch(colocated, both, "both-0", "store")
    address = colocated.children["both-0"].ready["rpc_address"]
    async with channel_as("client", colocated, address) as channel:
        with rpc.node_errors("both-0"), pytest.raises(grpc.aio.AioRpcError, match="not for the role client"):
            await node_pb2_grpc.RolesStub(channel).Switch(node_pb2.SwitchRequest(role="decode"), timeout=20)

    async def unchanged() -> bool:
        return bool((await nodes(both)).get("both-0", {}).get("role") == "both")

    # While a busy machine has a node's lease lapse, the conductor does not know it.
    await eventually(unchanged)
