"""Real nodes publish KV events: who follows them knows the same blocks as the index."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np

from moonpool.client import Client, Reply
from moonpool.kvstore.blocks.keys import BlockKey, extend
from moonpool.kvstore.events.messages import BlockStored
from moonpool.kvstore.events.subscriber import EventSource, Lost
from moonpool.kvstore.index.redis.client import connect
from moonpool.kvstore.index.redis.kv_index import KVIndex
from moonpool.local.cluster import LocalCluster
from moonpool.runtime.config.options import EventsOptions
from tests.cluster.conftest import eventually, small_config


async def test_what_real_nodes_announce_is_what_the_index_says(tmp_path: Path) -> None:
    config = small_config()
    config = replace(
        config,
        cluster=replace(config.cluster, prefill=1, decode=1),
        # Every node binds a port of its own, and says in the index which.
        events=EventsOptions(zmq_endpoint="tcp://127.0.0.1:*", topic="kv@pod@demo"),
    )
    async with LocalCluster(config, directory=tmp_path) as cluster, Client(cluster.url) as client:
        redis = connect(cluster.config.index.redis_url)
        index = KVIndex(redis, config.index.namespace)
        endpoint = (await index.nodes())["prefill-0"].extra["kv_events"]
        source = EventSource(endpoint, topic="kv@pod")
        told: dict[BlockKey, BlockKey | None] = {}

        async def follow() -> None:
            async for batch in source.batches():
                assert not isinstance(batch, Lost)
                for event in batch.events:
                    if isinstance(event, BlockStored):
                        _check(event, told)

        following = asyncio.create_task(follow())
        try:
            number = 0
            # A subscription takes effect some time after it was made: go on until something came.
            while not told:
                number += 1
                prompt = f"{number}. And it came to pass in those days. " * 12
                async for _ in client.complete(prompt, Reply(), max_tokens=2, temperature=0):
                    pass
                await asyncio.wait((following,), timeout=0.1)

            async def is_named() -> bool:
                # Events and the index go two ways: either may be first.
                named = (await index.snapshot()).get("prefill-0", {})
                return told.keys() <= named.keys() and any(parent is not None for parent in told.values())

            await eventually(is_named)
            assert not following.done()
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
            source.close()
            await redis.aclose()


def _check(event: BlockStored, told: dict[BlockKey, BlockKey | None]) -> None:
    """Each key follows from the one before it and its tokens, as ours do."""
    previous, size = event.parent_block_hash, event.block_size
    for number, name in enumerate(event.block_hashes):
        tokens = np.array(event.token_ids[number * size : (number + 1) * size], "<i4")
        assert isinstance(name, bytes)
        assert len(tokens) == size
        if isinstance(previous, bytes):
            assert extend(previous, tokens.tobytes()) == name
        told[BlockKey(name)] = BlockKey(previous) if isinstance(previous, bytes) else None
        previous = name
