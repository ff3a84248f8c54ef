"""Blocks that left the pool come back: from host memory, byte for byte."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from dataclasses import replace

import aiohttp
import openai
import pytest
import pytest_asyncio

from moonpool.client import Client
from moonpool.local_cluster import LocalCluster
from runtime.options import Config
from tests.cluster.conftest import eventually, small_config
from tests.cluster.test_serving import BLOCK_SIZE, greedy, prompt_of

pytestmark = pytest.mark.asyncio(loop_scope="module")

LENGTH = 321
HIT_TOKENS = (LENGTH - 1) // BLOCK_SIZE * BLOCK_SIZE


def tiny_pool_config() -> Config:
    """One node of each role, whose pools hold a few prompts only."""
    config = small_config()
    return replace(
        config,
        cluster=replace(config.cluster, prefill=1, decode=1),
        engine=replace(config.engine, pool_nbytes=8 << 20),
        store=replace(config.store, host=replace(config.store.host, capacity_nbytes=32 << 20)),
    )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalCluster]:
    async with LocalCluster(tiny_pool_config(), directory=tmp_path_factory.mktemp("tiers")) as running:
        yield running


@pytest.fixture(scope="module")
def api(cluster: LocalCluster) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0)


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
    prompt = prompt_of(LENGTH, seed=1)
    first, _ = await greedy(api, prompt, 24)
    await push_out(api, 100)

    async def loaded_from_host() -> bool:
        again, cached = await greedy(api, prompt, 24)
        assert again == first
        metrics = await metrics_of(client, "prefill-0")
        from_host = metrics['moonpool_prefill_tokens_total{source="host"}']
        return cached == HIT_TOKENS and from_host >= HIT_TOKENS / 2

    # At once, but for the blocks' way through the index to the conductor.
    await eventually(loaded_from_host)


async def test_what_the_tiers_hold_is_shown(client: Client) -> None:
    async def shown() -> bool:
        nodes = (await client.cluster())["nodes"]
        host = [tier for node in nodes for tier in node["tiers"] if tier["name"] == "host"]
        return len(host) == 2 and all(0 < tier["num_used_blocks"] <= tier["num_blocks"] for tier in host)

    # With the next heartbeat of each.
    await eventually(shown)
    metrics = await metrics_of(client, "prefill-0")
    assert metrics['moonpool_store_blocks{tier="host"}'] > 0
    assert metrics['moonpool_store_hit_blocks_total{tier="host"}'] > 0
