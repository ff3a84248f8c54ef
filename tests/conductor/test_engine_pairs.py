"""A prefill and a decode engine of another project under one conductor. Stand-ins serve the tokens."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest

from moonpool.conductor.request import SamplingParams
from tests.conductor.core_nodes import MODEL, PROMPT, Cluster, continuation, request, running
from tests.conductor.engine_server import KEY, EngineServer, engines, state_of

GIVEN = {"do_remote_prefill": True, "remote_engine_id": "p0"}


async def waits(engine: EngineServer, body: dict[str, Any], index: int) -> None:
    await asyncio.sleep(60)


async def is_idle(cluster: Cluster) -> None:
    """Nothing of a request is left in the books of the conductor."""

    def idle() -> bool:
        loads = [node["load"] for node in cluster.conductor.cluster()["nodes"]]
        return not any(load["own_prefills"] or load["own_decodes"] for load in loads)

    await cluster.until(idle)


async def test_a_prompt_is_computed_on_one_engine_and_decoded_on_another(url: str) -> None:
    async with running(url, namespace="pair", engine_key=KEY) as cluster:
        prefill, decode = EngineServer("p0", role="prefill"), EngineServer("d0", role="decode")
        async with engines(cluster, prefill, decode):
            sampling = SamplingParams(max_tokens=8, temperature=0.5, seed=3, min_tokens=4)
            events = await cluster.events(request(sampling=sampling))
            assert [event.token_id for event in events] == continuation(PROMPT, 8)
            [asked], [body] = prefill.bodies, decode.bodies
            assert (asked["prompt"], asked["max_tokens"]) == (PROMPT, 1)
            # All tokens are drawn by one engine, from one seed.
            assert (body["prompt"], body["max_tokens"], body["seed"]) == (PROMPT, 8, 3)
            assert body["kv_transfer_params"] == GIVEN
            assert events[-1].num_cached_tokens == 0, "what the prefill engine had, not what it handed over"
            timeline = cluster.conductor.timeline("r")
            assert timeline is not None
            summary = timeline.summary
            assert (summary.prefill_node, summary.decode_node, summary.attempts) == ("p0", "d0", 1)
            names = cluster.names("r")
            assert names == ["queued", "placed", "prefilled", "first_token", "transferred", "cached", "done"]
            num_blocks = -(-(len(PROMPT) - 1) // MODEL.block_size)
            assert summary.transferred_nbytes == num_blocks * 4096
            await is_idle(cluster)


async def test_a_tenants_salt_is_told_to_both(url: str) -> None:
    async with running(url, namespace="pair-salt", engine_key=KEY) as cluster:
        prefill, decode = EngineServer("p0", role="prefill"), EngineServer("d0", role="decode")
        async with engines(cluster, prefill, decode):
            await cluster.events(request(tenant="one", max_tokens=4))
            salts = [server.bodies[0]["cache_salt"] for server in (prefill, decode)]
            assert salts == [cluster.conductor._deps.registry.salt("one")] * 2


async def test_a_prefill_engine_that_dies_costs_no_token(url: str) -> None:
    async def dies(engine: EngineServer, body: dict[str, Any], index: int) -> None:
        await asyncio.shield(asyncio.ensure_future(engine.die()))

    async with running(url, namespace="pair-prefill", engine_key=KEY, policy="least-loaded") as cluster:
        servers = [EngineServer("p0", dies, role="prefill"), EngineServer("p1", role="prefill")]
        decode = EngineServer("d0", role="decode")
        async with engines(cluster, *servers, decode):
            # One of the two is asked first.
            for number in range(2):
                assert await cluster.generate(request(f"r{number}")) == continuation(PROMPT, 8)
            assert len(servers[0].bodies) == 1
            assert decode.bodies[0]["kv_transfer_params"]["remote_engine_id"] == "p1"
            await is_idle(cluster)


async def test_a_decode_engine_that_dies_costs_no_token(url: str) -> None:
    async def dies(engine: EngineServer, body: dict[str, Any], index: int) -> None:
        if index == 3:
            await asyncio.shield(asyncio.ensure_future(engine.die()))

    async with running(url, namespace="pair-decode", engine_key=KEY, policy="least-loaded") as cluster:
        prefill = EngineServer("p0", role="prefill")
        servers = [EngineServer("d0", dies, role="decode"), EngineServer("d1", role="decode")]
        async with engines(cluster, prefill, *servers):
            for number in range(2):
                assert await cluster.generate(request(f"r{number}")) == continuation(PROMPT, 8)
            [lost] = servers[0].bodies
            retried = next(body for body in servers[1].bodies if body["request_id"].endswith("-1"))
            assert retried["prompt"] == lost["prompt"] + continuation(PROMPT, 3)
            assert retried["kv_transfer_params"] == GIVEN
            await is_idle(cluster)


@pytest.mark.parametrize("which", ["p0", "d0"])
async def test_an_abandoned_request_ends_on_the_engine_that_has_it(url: str, which: str) -> None:
    async with running(url, namespace=f"pair-abort-{which}", engine_key=KEY) as cluster:
        prefill, decode = EngineServer("p0", role="prefill"), EngineServer("d0", role="decode")
        engine = prefill if which == "p0" else decode
        engine.script = waits
        async with engines(cluster, prefill, decode):
            events = cluster.conductor.generate(request())
            asking = asyncio.ensure_future(anext(events))
            await cluster.until(lambda: engine.num_running)
            asking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asking
            await cluster.until(lambda: engine.aborted == ["r-0"])
            await is_idle(cluster)


async def test_a_decode_engine_computes_what_is_not_handed_over(url: str) -> None:
    async with running(url, namespace="pair-alone", engine_key=KEY) as cluster:
        prefill, decode = EngineServer("p0", role="prefill"), EngineServer("d0", role="decode")
        prefill.hands_over = False
        async with engines(cluster, prefill, decode):
            assert await cluster.generate(request()) == continuation(PROMPT, 8)
            assert "kv_transfer_params" not in decode.bodies[0]
            assert "transferred" not in cluster.names("r")
            assert state_of(cluster, "p0") == "ready"
