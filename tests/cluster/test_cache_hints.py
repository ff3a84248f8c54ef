"""Hints on a real cluster: what is pinned stays, what is dropped goes first, what is prefetched is there."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from moonpool.client import Client
from moonpool.local.cluster import LocalCluster
from tests.cluster.conftest import eventually, small_config

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

POOL_BLOCKS, HOST_BLOCKS = 64, 8
CONVERSATION_BLOCKS = 12


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(shared_cluster: LocalCluster, tmp_path_factory: Any) -> AsyncIterator[LocalCluster]:
    """One node, with room for a few prompts."""
    async with Client(shared_cluster.url) as client:
        nbytes = (await client.cluster())["block_nbytes"]
    config = small_config()
    config = replace(
        config,
        cluster=replace(config.cluster, prefill=0, decode=0, both=1),
        engine=replace(config.engine, pool_nbytes=POOL_BLOCKS * nbytes),
        store=replace(config.store, host=replace(config.store.host, capacity_nbytes=HOST_BLOCKS * nbytes)),
    )
    async with LocalCluster(config, directory=tmp_path_factory.mktemp("hints")) as running:
        yield running


class Talk:
    def __init__(self, cluster: LocalCluster, http: aiohttp.ClientSession, block_size: int) -> None:
        self.url, self.http, self.block_size = cluster.url, http, block_size

    async def post(self, path: str, **body: Any) -> Any:
        async with self.http.post(self.url + path, json=body) as response:
            assert response.status == 200, await response.text()
            return await response.json()

    async def cached(self, name: int, **hint: Any) -> float:
        """Ask with a prompt of its own; returns the part of it that was cached."""
        tokens = [7 + name, *range(20, 20 + CONVERSATION_BLOCKS * self.block_size)]
        body = {"prompt": tokens, "max_tokens": 1, "temperature": 0}
        before = await self.followed()
        answer = await self.post("/v1/completions", **body, **({"cache_hint": hint} if hint else {}))
        if hint:
            await eventually(lambda: self.more_followed(before))
        return float(answer["usage"]["prompt_tokens_details"]["cached_tokens"] / len(tokens))

    async def followed(self) -> float:
        async with self.http.get(f"{self.url}/metrics") as response:
            lines = (await response.text()).splitlines()
        done = 'moonpool_cache_hints_total{outcome="done"} '
        return sum(float(line.removeprefix(done)) for line in lines if line.startswith(done))

    async def more_followed(self, before: float) -> bool:
        return await self.followed() > before


@pytest_asyncio.fixture(loop_scope="module")
async def talk(cluster: LocalCluster) -> AsyncIterator[Talk]:
    async with aiohttp.ClientSession() as http, Client(cluster.url) as client:
        yield Talk(cluster, http, (await client.cluster())["block_size"])


async def test_a_pinned_conversation_outlives_the_load_of_a_tool_call(talk: Talk) -> None:
    assert await talk.cached(1, pin_s=600) == 0
    assert await talk.cached(2) == 0
    for other in range(3, 15):
        await talk.cached(other)
    assert await talk.cached(2) == 0, "the load was not enough"
    assert await talk.cached(1) > 0.9


async def test_dropped_conversations_go_before_older_ones(talk: Talk) -> None:
    await talk.cached(20)
    for other in range(21, 33):
        await talk.cached(other, drop_after=True)
    assert await talk.cached(20) > 0.9


async def test_a_prefetched_prompt_is_cached_for_the_next_turn(talk: Talk) -> None:
    # With the conversation of the first test, as many blocks as a tenant may keep: a quarter of both tiers.
    messages = [
        {"role": "user", "content": "And it came to pass in those days. " * 8},
        {"role": "assistant", "content": "I look it up."},
    ]
    warmed = await talk.post("/v1/prefetch", messages=messages, cache_hint={"pin_s": 60})
    assert warmed["prompt_tokens"] // talk.block_size + CONVERSATION_BLOCKS <= (POOL_BLOCKS + HOST_BLOCKS) / 4
    for other in range(40, 52):
        await talk.cached(other)
    messages.append({"role": "user", "content": "It was found."})
    answer = await talk.post("/v1/chat/completions", messages=messages, max_tokens=4)
    cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached >= warmed["prompt_tokens"] - talk.block_size
