"""Blocks that left the pool come back, byte for byte: from host memory, and after kill -9 from disk."""

from __future__ import annotations

import asyncio
import itertools
import re
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import aiohttp
import numpy as np
import pytest
import pytest_asyncio

from moonpool.client import Client
from moonpool.kvstore.blocks import keys as block_keys
from moonpool.kvstore.blocks.tier import Tier
from moonpool.kvstore.index.redis.kv_index import replay
from moonpool.local.cluster import LocalCluster
from moonpool.protos import node_pb2, node_pb2_grpc
from moonpool.runtime import rpc
from moonpool.runtime.config.options import Config
from tests.cluster.conftest import channel_as, eventually, kill, small_config
from tests.cluster.test_serving import BLOCK_SIZE, greedy, prompt_of
from tests.lazily import Lazily

openai = Lazily("openai")

pytestmark = pytest.mark.asyncio(loop_scope="module")

LENGTH = 321
HIT_TOKENS = (LENGTH - 1) // BLOCK_SIZE * BLOCK_SIZE


def tiny_pool_config(disk: Path) -> Config:
    """One node of each role, whose pools and host memory hold a few prompts only."""
    config = small_config()
    host = replace(config.store.host, capacity_nbytes=16 << 20)
    ssd = replace(config.store.ssd, path=str(disk), capacity_nbytes=256 << 20, deadline_s=30.0)
    return replace(
        config,
        cluster=replace(config.cluster, prefill=1, decode=1),
        engine=replace(config.engine, pool_nbytes=8 << 20),
        store=replace(config.store, host=host, ssd=ssd, flush_s=30.0),  # the disk may stand still for a while
    )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalCluster]:
    directory = tmp_path_factory.mktemp("tiers")
    async with LocalCluster(tiny_pool_config(directory / "disk"), directory=directory) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def api(cluster: LocalCluster) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0) as api:
        yield api


async def push_out(api: openai.AsyncOpenAI, first_seed: int) -> None:
    """Other prompts, more than the pools hold."""
    for seed in range(first_seed, first_seed + 5):
        await greedy(api, prompt_of(LENGTH, seed=seed), 2)


async def metrics_of(client: Client, node_id: str) -> dict[str, float]:
    node = next(node for node in (await client.cluster())["nodes"] if node["node_id"] == node_id)
    async with aiohttp.ClientSession() as session, session.get(node["metrics_url"]) as answer:
        lines = (await answer.text()).splitlines()
    samples = (re.fullmatch(r"([^#]\S*) (\S+)", line) for line in lines)
    return {sample[1]: float(sample[2]) for sample in samples if sample}


async def test_a_prompt_the_pool_has_forgotten_is_loaded_from_host_memory(
    cluster: LocalCluster, client: Client, api: openai.AsyncOpenAI
) -> None:
    seeds = itertools.count(100, 6)

    async def from_host() -> float:
        """Blocks. The rest of a prompt may be computed on the decode node."""
        found = [await metrics_of(client, node_id) for node_id in ("prefill-0", "decode-0")]
        return sum(each.get('moonpool_store_hit_blocks_total{tier="host"}', 0) for each in found)

    async def loaded_from_host() -> bool:
        # A new prompt each time: one that is asked for again and again is the last to leave a pool.
        seed, before = next(seeds), await from_host()
        prompt = prompt_of(LENGTH, seed=seed)
        first, _ = await greedy(api, prompt, 24)
        await push_out(api, seed + 1)
        again, cached = await greedy(api, prompt, 24)
        assert again == first
        return cached == HIT_TOKENS and await from_host() >= before + HIT_TOKENS / BLOCK_SIZE / 2

    await eventually(loaded_from_host, timeout_s=120)


async def test_what_the_tiers_hold_is_shown(client: Client) -> None:
    async def shown() -> bool:
        nodes = (await client.cluster())["nodes"]
        host = [tier for node in nodes for tier in node["tiers"] if tier["name"] == "host"]
        return len(host) == 2 and all(0 < tier["num_used_blocks"] <= tier["num_blocks"] for tier in host)

    async def counted() -> bool:
        found = [await metrics_of(client, node_id) for node_id in ("prefill-0", "decode-0")]
        assert all(each['moonpool_store_blocks{shelf="kv",tier="host"}'] > 0 for each in found)
        return any(each.get('moonpool_store_hit_blocks_total{tier="host"}', 0) > 0 for each in found)

    # With the next heartbeat of each, and some time after the request.
    await eventually(shown)
    await eventually(counted)


def prefill_of(name: str, tokens: list[int], *, followed: bool = False) -> node_pb2.PrefillRequest:
    work = node_pb2.Work(
        request_id=name,
        token_ids=np.array(tokens, "<i4").tobytes(),
        num_prompt_tokens=len(tokens),
        root_key=b"r" * 16,
        sampling=node_pb2.Sampling(top_p=1.0, repetition_penalty=1.0, max_tokens=8, num_logprobs=-1),
        left_s=60,
    )
    return node_pb2.PrefillRequest(work=work, followed=followed)


async def test_what_is_on_disk_comes_to_host_memory_while_its_prompt_waits_for_room(
    cluster: LocalCluster, client: Client
) -> None:
    prompt = prompt_of(LENGTH, seed=3)
    keys = block_keys.chain(b"r" * 16, np.array(prompt[:HIT_TOKENS], np.int32), BLOCK_SIZE)

    async def address() -> str:
        return next(
            n["rpc_address"] for n in (await client.cluster())["nodes"] if n["node_id"] == "prefill-0"
        )

    async with channel_as("conductor", cluster, await address()) as channel:
        first = await node_pb2_grpc.PrefillNodeStub(channel).Prefill(prefill_of("first", prompt))
    # It writes what only memory holds, and has it on disk when it is back.
    before = await address()
    await cluster.children["prefill-0"].stop(60.0)
    await cluster.restart("prefill-0")

    async def back() -> bool:
        return await address() != before

    await eventually(back)
    async with (
        rpc.channel(await address()) as channel,
        channel_as("conductor", cluster, await address()) as conductor,
        channel_as("node", cluster, await address()) as follower,
    ):
        node, prefill = node_pb2_grpc.NodeStub(channel), node_pb2_grpc.PrefillNodeStub(conductor)

        async def tiers() -> set[Tier]:
            held = replay([part.changes async for part in node.ListBlocks(node_pb2.ListBlocksRequest())])
            return {held[key] for key in keys}

        async def in_host_memory() -> bool:
            return await tiers() == {Tier.HOST}

        assert await tiers() == {Tier.SSD}
        # Somebody's finished blocks, not taken yet, leave no room in the pool.
        await prefill.Prefill(prefill_of("holder", prompt_of(70 * BLOCK_SIZE, seed=4), followed=True))
        waiting = asyncio.ensure_future(prefill.Prefill(prefill_of("again", prompt)))
        await eventually(in_host_memory)
        assert not waiting.done()
        follow = node_pb2_grpc.PrefillNodeStub(follower).Follow(node_pb2.FollowRequest(request_id="holder"))
        chunk = await anext(aiter(follow))
        follow.cancel()
        await node.Release(node_pb2.ReleaseRequest(lease_id=chunk.lease_id))
        again = await waiting
        assert again.token.token_id == first.token.token_id
        assert (again.num_host_tokens, again.num_ssd_tokens) == (HIT_TOKENS, 0)
        assert (await metrics_of(client, "prefill-0"))["moonpool_store_prefetched_blocks_total"] == len(keys)


@pytest.mark.slow
async def test_a_killed_node_takes_its_blocks_on_disk_up_again(
    cluster: LocalCluster, client: Client, api: openai.AsyncOpenAI
) -> None:
    prompt = prompt_of(LENGTH, seed=2)
    first, _ = await greedy(api, prompt, 24)
    # Out of the pool, then out of host memory.
    for first_seed in (200, 205, 210):
        await push_out(api, first_seed)

    async def on_disk() -> bool:
        held = [await metrics_of(client, name) for name in ("prefill-0", "decode-0")]
        return all(
            metrics['moonpool_store_blocks{shelf="kv",tier="ssd"}'] >= 2 * HIT_TOKENS / BLOCK_SIZE
            for metrics in held
        )

    await eventually(on_disk)
    for name in ("prefill-0", "decode-0"):
        kill(cluster, name)
        await cluster.children[name].wait()
        await cluster.restart(name)

    async def loaded_from_disk() -> bool:
        try:
            again, cached = await greedy(api, prompt, 24)
        except openai.APIStatusError:
            return False  # the conductor has not seen the new lives of the nodes yet
        assert again == first
        metrics = await metrics_of(client, "prefill-0")
        from_disk = metrics['moonpool_prefill_tokens_total{source="ssd"}']
        return cached == HIT_TOKENS and from_disk >= HIT_TOKENS / 2

    await eventually(loaded_from_disk)
