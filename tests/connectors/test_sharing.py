"""Moonpool's own nodes and engines of vLLM in one index: neither takes the other's blocks for its own."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from moonpool.client import Client, Reply
from moonpool.kvstore.index.redis.client import connect
from moonpool.kvstore.index.redis.kv_index import KVIndex
from moonpool.kvstore.objects.errors import OtherLayout
from moonpool.local.cluster import LocalCluster
from moonpool.protos import node_pb2
from tests.cluster.conftest import eventually, small_config
from tests.connectors.conftest import Redis
from tests.connectors.small_engine import SmallEngine

NAMESPACE = "both"
LEASE_S = 120.0  # a busy machine renews late
PROMPT = "And the two kept what they had, each in its own measure. " * 24


async def cached_tokens(client: Client) -> int:
    reply = Reply()
    async for _ in client.complete(PROMPT, reply, max_tokens=4, temperature=0):
        pass
    return int((await client.timeline(reply.id))["summary"]["cached_tokens"])


@pytest.mark.slow
async def test_own_nodes_and_an_engine_share_the_index_and_no_block(redis: Redis) -> None:
    config = small_config()
    index_options = replace(config.index, redis_url=redis.url, namespace=NAMESPACE, lease_ttl_s=LEASE_S)
    config = replace(config, index=index_options)
    async with LocalCluster(config) as cluster, Client(cluster.url) as client:
        sets = [f"index.namespace={NAMESPACE}", f"index.lease_ttl_s={LEASE_S}"]
        engine = await asyncio.to_thread(SmallEngine, redis.url, "an-engine", sets=sets)
        own = connect(redis.url)
        try:
            await asyncio.to_thread(engine.until_hit, "a", 6)
            assert not await cached_tokens(client)
            index = KVIndex(own, NAMESPACE)

            async def holders() -> list[str]:
                """The engine, and the nodes that the prompt was computed on."""
                found = sorted(name for name, blocks in (await index.snapshot()).items() if blocks)
                return found if len(found) > 1 and "an-engine" in found else []

            await eventually(holders)

            async def hits() -> int:
                return await cached_tokens(client)

            await eventually(hits)  # the cluster serves on, with its cache
            held = await index.snapshot()
            [other, *_] = [name for name, blocks in held.items() if blocks and name != "an-engine"]
            assert not held[other].keys() & held["an-engine"].keys()

            async def is_refused() -> bool:
                nodes = (await client.cluster())["nodes"]
                return any((n["node_id"], n["state"]) == ("an-engine", "incompatible") for n in nodes)

            await eventually(is_refused)
            # Even a caller that names blocks of the other gets none of their bytes.
            source = node_pb2.KvAddress.FromString((await index.nodes())[other].kv_address)
            copying = engine.node._kv.replicate(source, list(held[other]))
            with pytest.raises(OtherLayout, match="KV blocks of layout"):
                await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(copying, engine.node._loop))
            assert (await index.snapshot())["an-engine"].keys() == held["an-engine"].keys()
        finally:
            await own.aclose()
            await asyncio.to_thread(engine.close)
