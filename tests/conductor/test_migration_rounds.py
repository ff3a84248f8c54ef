"""Rounds of decisions: real gRPC, a real Redis, nodes that follow a script."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from moonpool.protos import node_pb2
from tests.conductor.core_nodes import (
    PROMPT,
    RedisProcess,
    ScriptedNode,
    continuation,
    redis_process,
    request,
    running,
)

NUM_TOKENS = 100
PAUSE, STOP = 2, 5  # the source's token before which it waits; the first one of the target
# A step takes 1 ms, and 1 ms more for each sequence.
PROFILE = {"prefill_base_s": 1e-3, "prefill_token_s": 1e-5, "decode_base_s": 1e-3, "decode_sequence_s": 1e-3}


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisProcess]:
    with redis_process() as process:
        yield process


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
            node = await cluster.add(node_id, script)
            node.profile, node.take = PROFILE, take
            await node.announce()
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
