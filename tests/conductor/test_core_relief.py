"""A prompt that waits leaves its node when another can begin much sooner: real gRPC, a real Redis."""

from __future__ import annotations

import asyncio

import pytest

from moonpool.protos import node_pb2
from tests.conductor.core_nodes import (
    PROMPT,
    RedisProcess,
    ScriptedNode,
    continuation,
    request,
    running,
)

# A prompt is predicted to take so long; what waits behind another waits that long.
PROFILE = {"prefill_base_s": 60.0, "prefill_token_s": 1e-5, "decode_base_s": 1e-3}


@pytest.mark.parametrize("causes", [("queue",), ("drain",)])
async def test_a_newcomer_takes_over_a_prompt_that_waits(
    redis: RedisProcess, causes: tuple[str, ...]
) -> None:
    go_on, stuck = asyncio.Event(), asyncio.Semaphore(0)

    async def script(node: ScriptedNode, work: node_pb2.Work, index: int) -> None:
        stuck.release()
        await go_on.wait()

    async with (
        asyncio.timeout(60),
        running(redis.url, namespace=f"relief-{causes[0]}", migrate=causes, rejection="none") as cluster,
    ):
        members = cluster.conductor._deps.registry.members

        async def add(node_id: str, *scripts: object) -> None:
            node = await cluster.add(node_id, *scripts)  # type: ignore[arg-type]
            node.profile = PROFILE
            await node.announce()
            await cluster.until(lambda: members[node_id].view.cost.profile.prefill_base_s > 1)

        await add("p0", script)
        await cluster.add("d0")
        asked = []
        for name in ("r0", "r1", "r2"):
            asked.append(asyncio.create_task(cluster.generate(request(name, max_tokens=1))))
            await stuck.acquire()
        await add("p1")
        if causes == ("queue",):
            # The last one leaves; the one before would wait as long behind it.
            assert await asked[2] == continuation(PROMPT, 1)
            await cluster.until(lambda: ("r2", 0) in cluster.nodes["p0"].cancelled)
            events = {event.name: event.facts for event in cluster.conductor.timeline("r2").events}
            assert events["retry"]["cause"] == "queue"
        go_on.set()
        assert await asyncio.gather(*asked) == [continuation(PROMPT, 1)] * 3
        moved = [name for name in ("r0", "r1", "r2") if "retry" in cluster.names(name)]
        assert moved == (["r2"] if causes == ("queue",) else [])
