"""Rounds of decisions: real gRPC, a real Redis, nodes that follow a script."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from moonpool.kvstore.index.redis.node_record import NodeLoad
from moonpool.protos import node_pb2
from tests.conductor.core_nodes import (
    PROMPT,
    RedisProcess,
    ScriptedNode,
    continuation,
    request,
    running,
)

NUM_TOKENS = 100
PAUSE, STOP = 2, 5  # the source's token before which it waits; the first one of the target
# With r gone, the prompt fits on its node; before, on neither.
FREE_BLOCKS, OTHER_BLOCKS, PROMPT_TOKENS = 12, 12, 200
# A step takes 1 ms, and 1 ms more for each sequence.
PROFILE = {"prefill_base_s": 1e-3, "prefill_token_s": 1e-5, "decode_base_s": 1e-3, "decode_sequence_s": 1e-3}


@pytest.mark.parametrize("causes", [("hot-spot",), ("drain",)])
async def test_one_request_leaves_a_node_whose_steps_are_too_long(
    redis: RedisProcess, causes: tuple[str, ...]
) -> None:
    go_on, paused = asyncio.Event(), asyncio.Semaphore(0)

    async def script(node: ScriptedNode, work: node_pb2.Work, index: int) -> None:
        if work.attempt == 0 and index == PAUSE:
            paused.release()
            await go_on.wait()

    async def take(decode: node_pb2.DecodeRequest) -> list[int]:
        return PROMPT + continuation(PROMPT, STOP)

    name = "-".join(causes)
    async with (
        asyncio.timeout(60),
        running(
            redis.url, "p0", namespace=f"hot-{name}", migrate=causes, slo_tbt_s=3.5e-3, rejection="none"
        ) as cluster,
    ):
        members = cluster.conductor._deps.registry.members

        async def add(node_id: str) -> None:
            await cluster.add(node_id, script, profile=PROFILE, take=take)
            await cluster.until(lambda: members[node_id].view.cost.profile.decode_sequence_s > 0)

        await add("d0")
        names = ["r0", "r1", "r2"]
        asked = [asyncio.create_task(cluster.generate(request(one, max_tokens=NUM_TOKENS))) for one in names]
        for _ in names:
            await paused.acquire()
        await add("d1")
        if causes == ("hot-spot",):
            await cluster.until(lambda: len(members["d1"].load._decodes) == 1)
        go_on.set()
        assert await asyncio.gather(*asked) == [continuation(PROMPT, NUM_TOKENS)] * 3
        moved = [one for one in names if "migrated" in cluster.names(one)]
        # Two take 3 ms a step: fast enough, and so the others stay.
        assert len(moved) == (causes == ("hot-spot",))
        assert not any("retry" in cluster.names(one) for one in names)


async def test_a_node_that_drains_is_left_at_once_for_one_that_warms_up(redis: RedisProcess) -> None:
    """Though another one is warm, and has no room."""
    go_on, taken = asyncio.Event(), asyncio.Semaphore(0)

    async def script(node: ScriptedNode, work: node_pb2.Work, index: int) -> None:
        if index == (STOP if work.attempt == 0 else STOP + 2):
            await go_on.wait()

    async def take(decode: node_pb2.DecodeRequest) -> list[int]:
        taken.release()
        return PROMPT + continuation(PROMPT, STOP)

    async with asyncio.timeout(60), running(redis.url, "p0", namespace="warms", rejection="none") as cluster:
        members = cluster.conductor._deps.registry.members
        await cluster.add("d0", script)
        for number in range(8):
            await cluster.generate(request(f"warms-{number}", max_tokens=2))
        names = [f"r{number}" for number in range(6)]
        asked = [asyncio.create_task(cluster.generate(request(one, max_tokens=NUM_TOKENS))) for one in names]
        await cluster.until(lambda: all("transferred" in cluster.names(one) for one in names))
        await cluster.add("d1", script, load=NodeLoad(num_blocks=4096, free_blocks=0), take=take)
        await cluster.add("d2", script, take=take)
        await cluster.until(lambda: members["d1"].view.num_free_blocks == 0)
        cluster.nodes["d0"].state = "draining"
        await cluster.nodes["d0"].announce()
        for _ in names:
            await taken.acquire()
        go_on.set()
        assert await asyncio.gather(*asked) == [continuation(PROMPT, NUM_TOKENS)] * len(names)
        moved = [cluster.conductor.timeline(one).summary.decode_node for one in names]
        assert moved == ["d2"] * len(names)


@pytest.mark.parametrize(("cause", "priority"), [("defragment", 0), ("priority", -1)])
async def test_a_request_leaves_to_make_room_for_one_that_waits(
    redis: RedisProcess, cause: str, priority: int
) -> None:
    go_on, paused, admitted, moved = (asyncio.Event() for _ in range(4))

    async def script(node: ScriptedNode, work: node_pb2.Work, index: int) -> None:
        if work.request_id == "r" and work.attempt == 0 and index == PAUSE:
            paused.set()
            await go_on.wait()

    async def admit(decode: node_pb2.DecodeRequest) -> None:
        if decode.work.request_id == "waits":
            node = cluster.nodes["d0"]
            node.load = replace(node.load, num_waiting=1)
            await node.announce()
            await admitted.wait()

    async def take(decode: node_pb2.DecodeRequest) -> list[int]:
        assert decode.work.request_id == "r"
        moved.set()
        return PROMPT + continuation(PROMPT, STOP)

    async with (
        asyncio.timeout(60),
        running(redis.url, "p0", namespace=f"room-{cause}", migrate=(cause,), rejection="none") as cluster,
    ):
        await cluster.add("d0", script)
        first = asyncio.create_task(cluster.generate(request("r", max_tokens=NUM_TOKENS)))
        await paused.wait()
        node = cluster.nodes["d0"]
        node.admit, node.load = admit, replace(node.load, free_blocks=FREE_BLOCKS)
        await node.announce()
        prompt = list(range(200, 200 + PROMPT_TOKENS))
        asked = request("waits", prompt, max_tokens=4, priority=priority)
        second = asyncio.create_task(cluster.generate(asked))
        members = cluster.conductor._deps.registry.members
        await cluster.until(lambda: members["d0"].view.num_waiting == 1)
        room = NodeLoad(num_blocks=4096, free_blocks=OTHER_BLOCKS)
        await cluster.add("d1", script, load=room, take=take)
        await moved.wait()
        admitted.set()
        go_on.set()
        assert await first == continuation(PROMPT, NUM_TOKENS)
        assert await second == continuation(prompt, 4)
        await cluster.until(lambda: "migrated" in cluster.names("r"))
        events = cluster.conductor.timeline("r").events
        assert [event.facts["cause"] for event in events if event.name == "migrated"] == [cause]
