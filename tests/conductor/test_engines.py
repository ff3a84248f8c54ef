"""vLLM engines as nodes of a conductor: placement, streams, failures. A stand-in serves the tokens."""

from __future__ import annotations

import asyncio
import contextlib
import time
from itertools import pairwise
from statistics import fmean
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from moonpool.conductor.admission.tenants import Tenant
from moonpool.conductor.errors import RequestInvalid, RequestRejected
from moonpool.conductor.request import SamplingParams
from moonpool.kvstore.blocks.keys import BlockKey
from moonpool.kvstore.blocks.vllm_keys import VllmChain
from tests.conductor.core_nodes import MODEL, PROMPT, continuation, request, running
from tests.conductor.engine_server import KEY, NONE_HASH, EngineServer, engines, keys_of, state_of


async def test_a_request_is_served_and_told_of(url: str) -> None:
    async with running(url, namespace="engine", engine_key=KEY) as cluster:
        engine = EngineServer("e0")
        async with engines(cluster, engine):
            sampling = SamplingParams(max_tokens=8, temperature=0.5, seed=3, num_logprobs=1)
            events = await cluster.events(request(sampling=sampling))
            assert [event.token_id for event in events] == continuation(PROMPT, 8)
            assert [event.finish_reason for event in events] == [None] * 7 + ["length"]
            assert all(event.logprobs is not None and event.logprobs.rank == 1 for event in events)
            [body] = engine.bodies
            assert body["prompt"] == PROMPT
            assert (body["model"], body["max_tokens"], body["temperature"]) == ("served", 8, 0.5)
            timeline = cluster.conductor.timeline("r")
            assert timeline is not None
            summary = timeline.summary
            assert (summary.prefill_node, summary.decode_node, summary.attempts) == ("e0", "e0", 1)
            names = cluster.names("r")
            assert names == ["queued", "placed", "prefilled", "first_token", "cached", "done"]
            [node] = cluster.conductor.cluster()["nodes"]
            assert node["engine"] == f"vllm at http://127.0.0.1:{engine.port}"
            assert (node["load"]["num_blocks"], node["load"]["num_free_blocks"]) == (1000, 750)
            assert not engine.aborted


async def test_the_engine_with_the_prefix_gets_the_request(url: str) -> None:
    async def computes(engine: EngineServer, body: dict[str, Any], index: int) -> None:
        missing = [key for key in keys_of(body["prompt"]) if key not in engine.held]
        await asyncio.sleep(0.01 + 0.01 * len(missing) if index == 0 else 0)

    async with running(url, namespace="prefix", engine_key=KEY, policy="local-cache") as cluster:
        servers = [EngineServer(f"e{i}", computes) for i in range(3)]
        async with engines(cluster, *servers):
            mirror = cluster.conductor._deps.registry.mirror
            for turn, server in enumerate(servers):
                prompt = [turn] * 360 + PROMPT
                keys = keys_of(prompt)
                await server.hold(keys)
                await cluster.until(lambda keys=keys: mirror.longest_prefix(keys))
                events = await cluster.events(request(f"r{turn}", prompt=prompt, max_tokens=2))
                assert [len(each.bodies) for each in servers] == [i <= turn for i in range(3)]
                # The prompt has no full block more than the engine holds, and its usage says so.
                assert events[-1].num_cached_tokens == len(prompt) // MODEL.block_size * MODEL.block_size


@pytest.mark.parametrize(
    ("policy", "least", "most"),
    [("goodput", 1.0, 1.0), ("local-cache", 1.0, 1.0), ("round-robin", 0.0, 0.8), ("least-loaded", 0.0, 0.8)],
)
async def test_conversations_stay_where_their_cache_is(
    url: str, policy: str, least: float, most: float
) -> None:
    """Of the tokens that some engine has from earlier turns, this part is used."""
    async with running(url, namespace=f"turns-{policy}", engine_key=KEY, policy=policy) as cluster:
        servers = [EngineServer(f"e{i}") for i in range(3)]
        for server in servers:
            server.keeps = server.is_silent = True
        async with engines(cluster, *servers):
            mirror = cluster.conductor._deps.registry.mirror
            sessions = [[session] * 320 for session in range(4)]
            possible = 0
            for turn in range(3):
                for number, history in enumerate(sessions):
                    possible += len(history) - 32 if turn else 0
                    await cluster.events(request(f"r{turn}-{number}", prompt=history, max_tokens=4))
                    held = keys_of(history)
                    await cluster.until(lambda held=held: len(held) in mirror.longest_prefix(held).values())
                    history += [100 * turn + number] * 32
            assert least <= sum(server.num_cached_tokens for server in servers) / possible <= most


async def test_tenants_have_salts_of_their_own(url: str) -> None:
    async with running(url, namespace="salts", engine_key=KEY) as cluster:
        engine = EngineServer("e0")
        async with engines(cluster, engine):
            registry = cluster.conductor._deps.registry
            for tenant in ("", "one", "two"):
                await cluster.events(request(f"r{tenant}", tenant=tenant, max_tokens=2))
            assert "cache_salt" not in engine.bodies[0]
            salts = [body["cache_salt"] for body in engine.bodies[1:]]
            assert salts == [registry.salt("one"), registry.salt("two")]
            assert len(set(salts)) == 2
            chain = registry.chain("one")
            assert chain is not None
            found, _ = chain.extend(request().prompt_token_ids, MODEL.block_size, None)
            assert found == keys_of(PROMPT, salts[0])


async def test_a_request_goes_on_where_an_engine_died(url: str) -> None:
    async def dies(engine: EngineServer, body: dict[str, Any], index: int) -> None:
        if index == 3:
            await asyncio.shield(asyncio.ensure_future(engine.die()))

    async with running(url, namespace="dies", engine_key=KEY, policy="least-loaded") as cluster:
        servers = [EngineServer("e0", dies), EngineServer("e1")]
        async with engines(cluster, *servers):
            assert await cluster.generate(request()) == continuation(PROMPT, 8)
            assert servers[1].bodies[0]["prompt"] == PROMPT + continuation(PROMPT, 3)
            assert servers[1].bodies[0]["max_tokens"] == 5
            # The stream of random numbers of the tokens that were streamed is not used again.
            seeds = [server.bodies[0]["seed"] for server in servers]
            assert seeds[1] != seeds[0]
            await cluster.until(lambda: not state_of(cluster, "e0"))


async def test_what_an_engine_has_of_the_answer_is_not_cached_of_the_prompt(url: str) -> None:
    begun = continuation(PROMPT, 16)
    async with running(url, namespace="begun", engine_key=KEY) as cluster:
        engine = EngineServer("e0")
        async with engines(cluster, engine):
            keys = keys_of(PROMPT + begun)
            await engine.hold(keys)
            mirror = cluster.conductor._deps.registry.mirror
            await cluster.until(lambda: len(keys) in mirror.longest_prefix(keys).values())
            # Another conductor served its beginning on the same engine.
            goes_on = request(max_tokens=20, output_ids=tuple(begun), follows=True)
            async with contextlib.aclosing(cluster.conductor.generate(goes_on)) as stream:
                events = [event async for event in stream]
            assert [event.token_id for event in events] == continuation(PROMPT, 20)[16:]
            assert engine.num_cached_tokens == len(keys) * MODEL.block_size > len(PROMPT)
            assert sum(event.num_cached_tokens for event in events) == 0, "the first conductor's to tell"


async def test_an_abandoned_request_ends_on_the_engine(url: str) -> None:
    async def slow(engine: EngineServer, body: dict[str, Any], index: int) -> None:
        await asyncio.sleep(0.01 if index < 2 else 60)

    async with running(url, namespace="abort", engine_key=KEY) as cluster:
        engine = EngineServer("e0", slow)
        async with engines(cluster, engine):
            async with contextlib.aclosing(cluster.conductor.generate(request())) as events:
                assert (await anext(events)).index == 0
            await cluster.until(lambda: engine.aborted == ["r-0"])
            [node] = cluster.conductor.cluster()["nodes"]
            assert (node["load"]["own_prefills"], node["load"]["own_decodes"]) == (0, 0)


async def test_refusals(url: str) -> None:
    async def refuses(engine: EngineServer, body: dict[str, Any], index: int) -> None:
        if body["prompt"][0] == 7:
            raise web.HTTPBadRequest(text="no such thing")
        raise web.HTTPTooManyRequests

    async with running(url, namespace="refuses", engine_key=KEY) as cluster:
        engine = EngineServer("e0", refuses)
        async with engines(cluster, engine):
            with pytest.raises(RequestInvalid, match="no such thing"):
                await cluster.events(request("bad", prompt=[7] * 20))
            with pytest.raises(RequestRejected, match="429"):
                await cluster.events(request("busy"))


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        ({"block_size": 32}, "--block-size 16"),
        ({"max_model_len": 512}, "model.max_model_len=512"),
        ({"vocab_size": 100}, "vocabulary"),
        ({"hash_algorithm": "xxhash"}, "--prefix-caching-hash-algo sha256"),
        ({"probe": BlockKey(bytes(16)).hex()}, "hashes"),
        ({"url": "file:///etc/passwd"}, "cannot be used"),
    ],
)
async def test_what_does_not_fit_is_not_used(url: str, facts: dict[str, Any], why: str) -> None:
    async with running(url, namespace=f"unfit-{next(iter(facts))}", engine_key=KEY) as cluster:
        engine = EngineServer("e0", **facts)
        await engine.start(cluster)
        await cluster.until(lambda: cluster.conductor.cluster()["nodes"])
        [node] = cluster.conductor.cluster()["nodes"]
        assert node["state"] == "incompatible"
        assert why in node["incompatible"]
        await engine.die()
        await engine.publisher.close()


async def test_a_prompt_that_only_an_engine_of_another_layout_has_is_told_of(url: str) -> None:
    other = VllmChain(bytes(range(1, 17)), NONE_HASH)
    [probe], _ = other.extend(np.arange(MODEL.block_size, dtype=np.int32), MODEL.block_size, None)
    async with running(url, namespace="layouts", engine_key=KEY) as cluster:
        used = EngineServer("e0")
        unused = EngineServer("e1", fingerprint=bytes(range(1, 17)).hex(), probe=probe.hex())
        async with engines(cluster, used), engines(cluster, unused):
            assert state_of(cluster, "e1") == "incompatible"
            keys, _ = other.extend(request().prompt_token_ids, MODEL.block_size, None)
            await unused.hold(keys)
            mirror = cluster.conductor._deps.registry.mirror
            await cluster.until(lambda: mirror.longest_prefix(keys))
            for name, tenant in (("r", ""), ("other", "one")):
                await cluster.events(request(name, tenant=tenant, max_tokens=2))
            found = [cluster.conductor.timeline(name) for name in ("r", "other")]
            outcomes = [each.summary.prefix_outcome for each in found if each is not None]
            assert outcomes == ["layout", "salted"], "of a tenant's own prompts only"
            prompt = [7] * 16 + PROMPT
            own, (theirs, _) = keys_of(prompt), other.extend(np.array(prompt), MODEL.block_size, None)
            await used.hold(own[:1])
            await unused.hold(theirs)
            await cluster.until(lambda: mirror.longest_prefix(own) and mirror.longest_prefix(theirs))
            await cluster.events(request("part", prompt=prompt, max_tokens=2))
            part = cluster.conductor.timeline("part")
            assert part is not None
            assert (part.summary.prefix_outcome, part.summary.prefix_missed) == ("hit", "layout")
            assert not unused.bodies


async def test_an_engine_is_told_whose_quota_counts(url: str) -> None:
    async with running(url, namespace="quotas", engine_key=KEY) as cluster:
        engine = EngineServer("e0")
        async with engines(cluster, engine):
            client = Tenant("acme", cached_nbytes=1 << 20)
            for name, owner in (("r", client), ("s", Tenant())):
                await cluster.events(request(name, client=owner, max_tokens=2))
            owned, unowned = engine.bodies
            assert owned["kv_transfer_params"] == {"tenant": "acme", "tenant_cached_nbytes": 1 << 20}
            assert "kv_transfer_params" not in unowned


async def test_costs_are_learned(url: str) -> None:
    """Those that were there: a busy machine sleeps longer. Before, a step is thought to take 1.2 ms."""
    gaps_s: list[float] = []
    first_s: dict[int, list[float]] = {50: [], 100: [], 150: []}

    async def paced(engine: EngineServer, body: dict[str, Any], index: int) -> None:
        await asyncio.sleep(len(body["prompt"]) * 1e-3 if index == 0 else 8e-3)

    async with running(url, namespace="costs", engine_key=KEY) as cluster:
        engine = EngineServer("e0", paced)
        async with engines(cluster, engine):
            for i, length in enumerate((50, 100, 150, 50, 100, 150)):
                stream = cluster.conductor.generate(request(f"r{i}", prompt=[i] * length, max_tokens=20))
                times = [time.perf_counter(), *[time.perf_counter() async for _ in stream]]
                began_s = times.pop(0)
                first_s[length].append(times[0] - began_s)
                gaps_s += [after - before for before, after in pairwise(times)]
            [member] = cluster.conductor._deps.registry.members.values()
            profile = member.view.cost.profile
            between_s = 0.6 * fmean(first_s[100]) + 0.4 * fmean(first_s[150])
            assert 0.75 * 0.12 < profile.prefill_s(120, 0) < 1.25 * between_s
            assert 0.75 * 8e-3 < profile.step_s(1, 100) < 1.25 * fmean(gaps_s)
            errors = cluster.conductor.cluster()["prediction_errors"]
            assert errors["prefill"]["count"] == 2
