"""The blocks that a decode node fills with an answer are there for the next turn of the conversation."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
import pytest_asyncio

from moonpool.client import Client, Reply
from moonpool.local.cluster import LocalCluster
from moonpool.runtime.config.options import Config
from tests.cluster.conftest import eventually, small_config

pytestmark = pytest.mark.asyncio(loop_scope="module")

BLOCK_SIZE = Config().engine.block_size


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalCluster]:
    config = small_config()
    config = replace(
        config,
        cluster=replace(config.cluster, prefill=1, decode=1),
        # It always fetches the longer prefix: the default computes where that is predicted to be faster.
        conductor=replace(config.conductor, policy="kv-aware"),
    )
    async with LocalCluster(config, directory=tmp_path_factory.mktemp("conversation")) as running:
        yield running


@pytest.mark.parametrize("question", ["What is love?", "Who was Solomon?", "What is wisdom?"])
async def test_the_next_turn_of_a_conversation_hits_what_was_generated(client: Client, question: str) -> None:
    async def num_known() -> int:
        return int((await client.cluster())["index"]["num_blocks"])

    known_before = await num_known()
    messages = [{"role": "user", "content": question}]
    first = Reply()
    async for _ in client.chat(messages, first, temperature=0, max_tokens=400, min_tokens=384):
        pass
    messages += [
        {"role": "assistant", "content": first.text},
        {"role": "user", "content": "And what is war?"},
    ]
    # The last token has no KV yet.
    num_filled = (first.usage["total_tokens"] - 1) // BLOCK_SIZE

    async def published() -> bool:
        return await num_known() >= known_before + num_filled

    await eventually(published)
    second = Reply()
    async for _ in client.chat(messages, second, temperature=0, max_tokens=16):
        pass
    hit = second.usage["prompt_tokens_details"]["cached_tokens"]
    timeline = await client.timeline(second.id)
    summary = timeline["summary"]
    assert summary["cached_tokens"] == hit
    places = ("pool_tokens", "host_tokens", "ssd_tokens", "fetched_tokens")
    assert sum(summary[place] for place in places) == hit
    # Not only the first prompt: blocks the decode node filled count too. Not all of them: the answer's text
    # need not be tokenized as it was generated.
    assert hit > first.usage["prompt_tokens"] + BLOCK_SIZE, summary["detail"]
