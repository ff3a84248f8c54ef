"""A decode node that is ended hands all its requests on: that takes as long as their moves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
import pytest_asyncio

from moonpool.client import Client, Reply
from moonpool.local.cluster import LocalCluster
from tests.cluster.conftest import eventually, migrate, nodes, small_config
from tests.cluster.test_migration import events_of

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

# More than a node that warms up is given at once.
NUM_REQUESTS = 6
# So many that no request ends before all have left.
NUM_TOKENS = 1800
PARAMETERS: dict[str, Any] = {"max_tokens": NUM_TOKENS, "ignore_eos": True}
SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.9, "seed": 11},
    {"temperature": 0.8, "seed": 3, "top_p": 0.9, "presence_penalty": 0.7, "repetition_penalty": 1.1},
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalCluster]:
    config = small_config()
    config = replace(
        config,
        cluster=replace(config.cluster, prefill=1, decode=1),
        engine=replace(config.engine, pool_nbytes=128 << 20),
        conductor=replace(config.conductor, request_timeout_s=240.0),
    )
    directory = tmp_path_factory.mktemp("drain")
    async with LocalCluster(config, directory=directory, restart=True, supervises=True) as running:
        yield running


async def read(client: Client, number: int, reply: Reply) -> str:
    sampling = SAMPLINGS[number % len(SAMPLINGS)]
    async for _ in client.complete(f"{number}. In those days ", reply, **{**PARAMETERS, **sampling}):
        pass
    assert reply.usage["completion_tokens"] == NUM_TOKENS
    return reply.text


async def test_all_requests_leave_at_once_for_a_node_that_has_just_joined(
    cluster: LocalCluster, client: Client
) -> None:
    numbers = range(NUM_REQUESTS)
    expected = await asyncio.gather(*(read(client, number, Reply()) for number in numbers))
    (name,) = (await client.scale("decode", 2))["started"]

    async def joined() -> bool:
        return (await nodes(client)).get(name, {}).get("state") == "ready"

    await eventually(joined, timeout_s=120)
    replies = [Reply() for _ in numbers]
    streams = [asyncio.create_task(read(client, i, reply)) for i, reply in enumerate(replies)]

    async def all_decode() -> bool:
        return all(len(reply.pieces_s) >= 5 for reply in replies)

    await eventually(all_decode)
    for reply in replies:
        if (await client.timeline(reply.id))["summary"]["decode_node"] == name:
            await migrate(client, reply.id, "decode-0")
    await client.drain("decode-0")

    async def left() -> bool:
        return "decode-0" not in await nodes(client)

    await eventually(left, timeout_s=120)
    assert not any(stream.done() for stream in streams)
    assert await asyncio.gather(*streams) == expected
    for reply in replies:
        assert not await events_of(client, reply.id, "retry")
        *before, last = [move["cause"] for move in await events_of(client, reply.id, "migrated")]
        assert (before, last) in (([], "drain"), (["asked"], "drain"))

    async def ended() -> bool:
        return "decode-0" not in cluster.children

    await eventually(ended, timeout_s=120)
