"""Moves in which a side dies, stops, has no room, or is left: the same tokens, and no block leaks."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from moonpool.client import Client, Reply
from moonpool.errors import ApiError
from moonpool.local.cluster import LocalCluster
from moonpool.protos import node_pb2, node_pb2_grpc
from moonpool.runtime.service.child import Child
from tests.cluster import held_node
from tests.cluster.conftest import (
    another,
    channel_as,
    eventually,
    migrate,
    nodes,
    small_config,
    started,
)
from tests.cluster.held_node import ASKED, READING, STANDS_STILL
from tests.cluster.test_migration import events_of
from tests.processes import stop

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]

PROMPT = "In the beginning was the Word, and the Word was with God, and the Word was God. " * 60
NUM_TOKENS = 500
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 0.9, "seed": 11},
}
PARAMETERS: dict[str, Any] = {"max_tokens": NUM_TOKENS, "ignore_eos": True}


class HeldCluster(LocalCluster):
    """Its decode nodes can be held on a request's way to them: see ``held_node``."""

    async def _create_children(self) -> None:
        await super()._create_children()
        for child in self.nodes:
            can_be_held(child, self.directory)


def can_be_held(child: Child, directory: Path) -> Child:
    """``child``, not started yet: a node."""
    child._command[child._command.index("moonpool.node")] = held_node.__name__
    child.environment |= {held_node.DIRECTORY: str(directory), held_node.NAME: child.name}
    return child


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalCluster]:
    config = small_config()
    # A node that a busy machine leaves out for two seconds is not taken for dead: these tests count retries.
    config = replace(
        config,
        cluster=replace(config.cluster, prefill=1, decode=2),
        conductor=replace(config.conductor, request_timeout_s=240.0),
        index=replace(config.index, lease_ttl_s=5.0),
    )
    async with HeldCluster(config, directory=tmp_path_factory.mktemp("cluster")) as running:
        yield running


async def whole(client: Client, prompt: str, **parameters: Any) -> str:
    reply = Reply()
    async for _ in client.complete(prompt, reply, **{**PARAMETERS, **parameters}):
        pass
    assert reply.usage["completion_tokens"] == parameters.get("max_tokens", NUM_TOKENS)
    return reply.text


async def settled(cluster: LocalCluster, client: Client) -> None:
    """Wait until all nodes of the cluster serve in their present lives, and hold nothing for anyone."""

    async def idle() -> object:
        known = await nodes(client)
        waits = [
            child.name
            for child in cluster.nodes
            if child.name not in known
            or known[child.name]["state"] != "ready"
            or known[child.name]["pid"] != child.ready["pid"]
        ]
        used = {
            name: node["tiers"][0]["num_used_blocks"] for name, node in known.items() if name not in waits
        }
        return (
            not waits and not any(used.values()) and not any(n["load"]["own_decodes"] for n in known.values())
        )

    await eventually(idle)


async def decode_node(client: Client, reply: Reply) -> str:
    return str((await client.timeline(reply.id))["summary"]["decode_node"])


@asynccontextmanager
async def node_of(cluster: LocalCluster, child: Child) -> AsyncIterator[node_pb2_grpc.NodeStub]:
    async with channel_as("node", cluster, str(child.ready["rpc_address"])) as channel:
        yield node_pb2_grpc.NodeStub(channel)


@asynccontextmanager
async def held_move(
    cluster: LocalCluster, client: Client, reply: Reply, target: str, stage: str
) -> AsyncIterator[asyncio.Task[Any]]:
    """Move a running request to ``target``, which stays in ``stage`` inside the block."""
    hold, held = (
        held_node.hold_file(cluster.directory, target),
        held_node.held_file(cluster.directory, target),
    )
    held.unlink(missing_ok=True)
    hold.write_text(stage)
    move = asyncio.create_task(client.migrate(reply.id, target))
    try:

        async def is_held() -> bool:
            if move.done():
                pytest.fail(f"the move was over before it was held: {move.exception() or move.result()}")
            return held.exists()

        await eventually(is_held)
        yield move
    finally:
        hold.unlink()


def other_of(source: str) -> str:
    return "decode-1" if source == "decode-0" else "decode-0"


async def fail(fault: signal.Signals, pid: int) -> None:
    if fault is signal.SIGSTOP:
        await asyncio.to_thread(stop, pid)
    else:
        os.kill(pid, fault)


async def mend(cluster: LocalCluster, fault: signal.Signals, name: str) -> None:
    child = cluster.children[name]
    if fault is signal.SIGKILL:
        assert await child.wait() == -signal.SIGKILL
        await cluster.restart(name)
    else:
        os.kill(child.pid, signal.SIGCONT)


@pytest.mark.parametrize(("stage", "sampling"), [(ASKED, "greedy"), (READING, "seeded")])
@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
@pytest.mark.parametrize("side", ["source", "target"])
async def test_a_side_that_fails_while_the_source_decodes(
    cluster: LocalCluster, client: Client, side: str, fault: signal.Signals, stage: str, sampling: str
) -> None:
    move, victim, reply = await fail_in(stage, cluster, client, side, fault, SAMPLINGS[sampling])
    assert isinstance(move.exception(), ApiError)
    # The request stayed where it was, unless that node failed.
    assert bool(await events_of(client, reply.id, "retry")) == (side == "source")
    await mend(cluster, fault, victim)
    await settled(cluster, client)


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
@pytest.mark.parametrize("side", ["source", "target"])
async def test_a_side_that_fails_while_the_source_stands_still(
    cluster: LocalCluster, client: Client, side: str, fault: signal.Signals
) -> None:
    move, victim, reply = await fail_in(STANDS_STILL, cluster, client, side, fault, SAMPLINGS["seeded"])
    retries = await events_of(client, reply.id, "retry")
    if side == "target":
        # The source goes on by itself.
        assert isinstance(move.exception(), ApiError)
        assert not retries
    elif fault is signal.SIGKILL:
        assert retries
    await mend(cluster, fault, victim)
    await settled(cluster, client)


async def fail_in(
    stage: str,
    cluster: LocalCluster,
    client: Client,
    side: str,
    fault: signal.Signals,
    sampling: dict[str, Any],
) -> tuple[asyncio.Task[Any], str, Reply]:
    """Answer a request whose move is in ``stage`` when a side fails. Returns move, node and reply."""
    prompt = f"{stage} {side} {fault}. {PROMPT}"
    expected, reply, victim = await whole(client, prompt, **sampling), Reply(), ""
    await settled(cluster, client)
    move: asyncio.Task[Any] | None = None
    async for _ in client.complete(prompt, reply, **{**PARAMETERS, **sampling}):
        if move is None and len(reply.pieces_s) >= 10:
            source = await decode_node(client, reply)
            target = other_of(source)
            victim = source if side == "source" else target
            async with held_move(cluster, client, reply, target, stage) as move:
                await fail(fault, cluster.children[victim].pid)
                if victim == source and fault is signal.SIGKILL:
                    # Its memory lives on at the target, which could still take the rest from there.
                    await eventually(lambda: events_of(client, reply.id, "retry"))
    assert move is not None
    await asyncio.wait((move,))
    assert reply.text == expected
    assert reply.usage["completion_tokens"] == NUM_TOKENS
    return move, victim, reply


@pytest.mark.parametrize("end", ["leaves", "holds", "source killed"])
async def test_a_follower_that_fails_while_the_source_stands_still(
    cluster: LocalCluster, client: Client, end: str
) -> None:
    """The test itself is the target: it has the source stop the request, and reads nothing."""
    prompt, sampling = f"{end}. {PROMPT}", SAMPLINGS["seeded"]
    expected, reply, source, stopped = await whole(client, prompt, **sampling), Reply(), "", False
    await settled(cluster, client)
    async for _ in client.complete(prompt, reply, **{**PARAMETERS, **sampling}):
        if stopped or len(reply.pieces_s) < 10:
            continue
        source, stopped = await decode_node(client, reply), True
        async with channel_as("node", cluster, str(cluster.children[source].ready["rpc_address"])) as channel:
            stub = node_pb2_grpc.DecodeNodeStub(channel)
            num_tokens = (await client.timeline(reply.id))["summary"]["prompt_tokens"]
            follow = stub.FollowDecode(
                node_pb2.FollowRequest(request_id=reply.id, follower="a test", num_tokens=num_tokens)
            )
            async for chunk in follow:
                if chunk.first_block == 0:
                    await stub.Yield(node_pb2.YieldRequest(request_id=reply.id))
                if chunk.last:
                    break
            else:
                pytest.fail("the source sent no last chunk")
            if end == "holds":
                # The source goes on all the same, and ends the stream of chunks.
                async for _chunk in follow:
                    pytest.fail("a chunk after the last one")
            elif end == "source killed":
                os.kill(cluster.children[source].pid, signal.SIGKILL)
    assert stopped
    assert reply.text == expected
    retries = await events_of(client, reply.id, "retry")
    assert bool(retries) == (end == "source killed")
    if end == "source killed":
        await mend(cluster, signal.SIGKILL, source)
    await settled(cluster, client)


@pytest.mark.parametrize("stage", [ASKED, READING, STANDS_STILL])
async def test_a_client_that_goes_away_in_a_move(cluster: LocalCluster, client: Client, stage: str) -> None:
    reply = Reply()
    await settled(cluster, client)
    stream = client.complete(
        f"away, {stage}. {PROMPT}", reply, temperature=0, max_tokens=3000, ignore_eos=True
    )
    async for _ in stream:
        if len(reply.pieces_s) >= 10:
            break
    target = other_of(await decode_node(client, reply))
    async with held_move(cluster, client, reply, target, stage) as move:
        await stream.aclose()
        await asyncio.wait((move,))
    assert isinstance(move.exception(), ApiError)
    await settled(cluster, client)


async def test_a_target_without_blocks_leaves_the_request_where_it_is(
    cluster: LocalCluster, client: Client
) -> None:
    """One pool is too small for the prompt, the other fills up while the blocks are copied."""
    block_nbytes, block_size = (await client.cluster())["block_nbytes"], cluster.config.engine.block_size
    sampling = SAMPLINGS["greedy"] | {"max_tokens": 1000}
    expected, reply = await whole(client, PROMPT, **sampling), Reply()
    async for _ in client.complete(PROMPT, reply, **{**PARAMETERS, **sampling}):
        pass
    num_blocks = -(-reply.usage["prompt_tokens"] // block_size)
    # The second one has room for the tokens before the move, and not for those that come while it is held.
    smaller, small = [
        can_be_held(
            another(cluster, f"decode-{name}", "decode", f"engine.pool_nbytes={blocks * block_nbytes}"),
            cluster.directory,
        )
        for name, blocks in (("smaller", num_blocks // 2), ("small", num_blocks + 30))
    ]
    await settled(cluster, client)
    async with started(smaller, small):
        names = [smaller.name, small.name]

        async def known() -> object:
            states = {name: node["state"] for name, node in (await nodes(client)).items()}
            return all(states.get(name) == "ready" for name in names)

        await eventually(known)
        reply, refused = Reply(), list[ApiError]()
        async for _ in client.complete(PROMPT, reply, **{**PARAMETERS, **sampling}):
            if len(reply.pieces_s) < 10 or refused:
                continue
            source = await decode_node(client, reply)
            async with node_of(cluster, cluster.children[source]) as node:

                async def outgrown(node: node_pb2_grpc.NodeStub = node) -> bool:
                    status = await node.Status(node_pb2.StatusRequest())
                    return status.tiers[0].num_used_blocks > num_blocks + 31

                with pytest.raises(ApiError) as failure:
                    await client.migrate(reply.id, smaller.name)
                refused.append(failure.value)
                async with held_move(cluster, client, reply, small.name, READING) as move:
                    await eventually(outgrown)
                with pytest.raises(ApiError) as failure:
                    await move
                refused.append(failure.value)
        assert [error.status for error in refused] == [409, 409]
        assert all("blocks" in str(error) for error in refused)
        assert reply.text == expected
        assert not await events_of(client, reply.id, "retry")
        assert len(await events_of(client, reply.id, "stayed")) == 2

        async def empty() -> object:
            known = await nodes(client)
            return not any(known[name]["tiers"][0]["num_used_blocks"] for name in names)

        await eventually(empty)
    await settled(cluster, client)


async def test_a_source_that_takes_the_blocks_back_keeps_the_request(
    cluster: LocalCluster, client: Client
) -> None:
    """It has no block left for an earlier request while the later one is copied, and preempts that."""
    many = PARAMETERS | SAMPLINGS["greedy"] | {"max_tokens": 1250}
    prompts = [f"{name}. In those days " for name in ("earlier", "later")]
    expected = [await whole(client, prompt, **many) for prompt in prompts]
    nbytes = 100 * (await client.cluster())["block_nbytes"]  # 1,600 tokens: enough for one of them
    tight = another(cluster, "decode-tight", "decode", f"engine.pool_nbytes={nbytes}")
    await settled(cluster, client)

    async def decodes(*names: str) -> bool:
        known = (await nodes(client)).values()
        return {
            node["node_id"] for node in known if (node["role"], node["state"]) == ("decode", "ready")
        } == {*names}

    async with started(tight):
        await eventually(lambda: decodes("decode-0", "decode-1", tight.name))
        for name in ("decode-0", "decode-1"):
            await client.switch(name, "prefill")
        await eventually(lambda: decodes(tight.name))
        replies = [Reply() for _ in prompts]

        async def read(prompt: str, reply: Reply) -> None:
            async for _ in client.complete(prompt, reply, **many):
                pass

        streams = []
        for prompt, reply in zip(prompts, replies, strict=True):
            streams.append(asyncio.create_task(read(prompt, reply)))
            await eventually(lambda reply=reply: decoding(reply))  # type: ignore[misc]
        await client.switch("decode-0", "decode")
        await eventually(lambda: decodes("decode-0", tight.name))
        later = replies[1]
        async with held_move(cluster, client, later, "decode-0", READING) as move:
            await eventually(lambda: events_of(client, later.id, "preempted"))
        await asyncio.wait((move,))
        assert isinstance(move.exception(), ApiError)
        await asyncio.gather(*streams)
        assert [reply.text for reply in replies] == expected
        for reply in replies:
            assert not await events_of(client, reply.id, "retry")
            assert await decode_node(client, reply) == tight.name

        async def empty() -> object:
            return not (await nodes(client))[tight.name]["tiers"][0]["num_used_blocks"]

        await eventually(empty)
        await client.switch("decode-1", "decode")
        await eventually(lambda: decodes("decode-0", "decode-1", tight.name))
    await settled(cluster, client)


async def decoding(reply: Reply) -> bool:
    return len(reply.pieces_s) >= 10


async def test_a_node_that_is_ended_hands_its_streams_on(cluster: LocalCluster, client: Client) -> None:
    """SIGTERM: no stream is cut or placed again."""
    many = PARAMETERS | SAMPLINGS["greedy"] | {"max_tokens": 2000}
    prompts = [f"{number}. In those days " for number in range(2)]
    expected = await asyncio.gather(*(whole(client, prompt, **many) for prompt in prompts))
    leaving = another(cluster, "decode-leaving", "decode")
    async with started(leaving):

        async def known() -> object:
            return (await nodes(client)).get(leaving.name, {}).get("state") == "ready"

        await eventually(known)
        replies, there = [Reply() for _ in prompts], asyncio.Semaphore(0)

        async def stream(prompt: str, reply: Reply) -> None:
            moved = False
            async for _ in client.complete(prompt, reply, **many):
                if not moved and len(reply.pieces_s) >= 10:
                    if await decode_node(client, reply) != leaving.name:
                        await migrate(client, reply.id, leaving.name)
                    moved = True
                    there.release()

        streams = [asyncio.create_task(stream(*pair)) for pair in zip(prompts, replies, strict=True)]
        for _ in streams:
            await there.acquire()
        os.kill(leaving.pid, signal.SIGTERM)
        assert await asyncio.wait_for(leaving.wait(), 60) == 0
        await asyncio.gather(*streams)
    assert [reply.text for reply in replies] == expected
    for reply in replies:
        assert not await events_of(client, reply.id, "retry")
    causes = [event["cause"] for reply in replies for event in await events_of(client, reply.id, "migrated")]
    assert "drain" in causes
    await settled(cluster, client)


async def test_logprobs_and_stop_strings_are_the_same_after_moves(
    cluster: LocalCluster, client: Client
) -> None:
    async with aiohttp.ClientSession() as session:

        async def answer(name: str, **parameters: Any) -> dict[str, Any]:
            body = {"model": model, "prompt": "And it came to pass ", **PARAMETERS, **parameters}
            headers = {"x-request-id": name}
            async with session.post(f"{cluster.url}/v1/completions", json=body, headers=headers) as response:
                assert response.status == 200, await response.text()
                choice: dict[str, Any] = (await response.json())["choices"][0]
                return choice

        async def moved(name: str, **parameters: Any) -> dict[str, Any]:
            asked = asyncio.create_task(answer(name, **parameters))
            while not asked.done():
                with contextlib.suppress(ApiError):  # not decoding yet, or ended
                    await client.migrate(name)
                await asyncio.sleep(0.05)
            assert await events_of(client, name, "migrated")
            return await asked

        model = (await client.model())["id"]
        many = {"temperature": 0.8, "seed": 5, "logprobs": 3, "max_tokens": 1500}
        expected = await answer("logprobs-still", **many)
        assert len(expected["logprobs"]["token_logprobs"]) == 1500
        assert await moved("logprobs-moved", **many) == expected
        # The text from some place on, which is nowhere before: the answer ends there.
        text, length = str(expected["text"]), 8
        while text.index(text[-400 : -400 + length]) < len(text) - 400:
            length += 1
        stops = many | {"stop": [text[-400 : -400 + length]]}
        expected = await answer("stop-still", **stops)
        assert expected["finish_reason"] == "stop"
        assert await moved("stop-moved", **stops) == expected
    await settled(cluster, client)
