"""The index names blocks that nobody holds: the request is answered as ever, and the index is put right."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from moonpool.client import Client
from moonpool.conductor.fleet.served_model import ServedModel
from moonpool.kvstore.blocks import keys as block_keys
from moonpool.kvstore.blocks.keys import BlockKey
from moonpool.kvstore.blocks.tier import Tier
from moonpool.kvstore.index.redis.client import connect
from moonpool.kvstore.index.redis.kv_index import KVIndex, replay
from moonpool.local.cluster import LocalCluster
from moonpool.protos import node_pb2, node_pb2_grpc
from moonpool.runtime import rpc
from moonpool.runtime.config.options import Config
from tests.cluster.conftest import eventually, small_config
from tests.forked import run_module
from tests.lazily import Lazily

openai = Lazily("openai")

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalCluster]:
    config = small_config()
    # It always fetches the longer prefix: the default computes where that is predicted to be faster.
    config = replace(config, conductor=replace(config.conductor, policy="kv-aware"))
    async with LocalCluster(config, directory=tmp_path_factory.mktemp("stale")) as running:
        yield running


NUM_TOKENS = 800


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def index(cluster: LocalCluster) -> AsyncIterator[KVIndex]:
    redis = connect(cluster.config.index.redis_url)
    yield KVIndex(redis, cluster.config.index.namespace)
    await redis.aclose()


async def chain_of(index: KVIndex, cluster: LocalCluster, tokens: list[int]) -> list[BlockKey]:
    """The keys under which the cluster knows this prompt's blocks."""
    config = cluster.config
    record = (await index.nodes())["prefill-0"]
    model = ServedModel.from_checkpoint(
        config.model.directory, block_size=config.engine.block_size, name=config.model.served_name
    )
    root = block_keys.root_key(model=record.model.encode(), layout=model.layouts()[record.layout])
    return block_keys.chain(root, np.array(tokens, np.int32), config.engine.block_size)


async def really_held(index: KVIndex, node_id: str) -> set[BlockKey]:
    """What the node itself says it holds."""
    held: set[BlockKey] = set()
    async with rpc.channel((await index.nodes())[node_id].rpc_address) as channel:
        async for part in node_pb2_grpc.NodeStub(channel).ListBlocks(node_pb2.ListBlocksRequest()):
            held |= replay([part.changes]).keys()
    return held


@pytest.mark.parametrize("liar", ["prefill-0", "decode-0"])
async def test_a_block_that_is_not_there_is_computed_and_taken_out_of_the_index(
    cluster: LocalCluster, client: Client, index: KVIndex, liar: str
) -> None:
    api = openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0)
    tokens = [random.Random(liar).randrange(10, 1000) for _ in range(NUM_TOKENS)]
    chain = await chain_of(index, cluster, tokens)
    # As a lost message, or a bug, would leave it: the node lives, and has none of this. Not the last block:
    # it holds the token that is computed in any case, so nobody asks for it, and nobody finds out.
    told = chain[: (NUM_TOKENS - 1) // cluster.config.engine.block_size]

    async def seen() -> bool:
        return set(told) <= replay([await client.index_blocks(liar)]).keys()

    assert not await seen()
    await index.publish(liar, (await index.nodes())[liar].epoch, stored=[(key, Tier.POOL) for key in told])
    await eventually(seen)
    options: dict[str, Any] = {"model": Config().model.served_name, "max_tokens": 8, "temperature": 0}
    answer = await api.completions.create(prompt=tokens, **options)
    events = {event["event"]: event for event in (await client.timeline(answer.id))["events"]}
    assert events["prefix_loaded"]["stale_blocks"] >= NUM_TOKENS // Config().engine.block_size - 1
    assert "retry" not in events
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 0

    async def repaired() -> bool:
        said = (await index.snapshot())[liar].keys() & set(chain)
        return said == await really_held(index, liar) & set(chain)

    await eventually(repaired)
    again = await api.completions.create(prompt=tokens, **options)
    assert again.choices[0].text == answer.choices[0].text
    await api.close()


async def test_index_verify_finds_and_repairs_what_a_real_cluster_has_wrong(
    cluster: LocalCluster, client: Client, index: KVIndex
) -> None:
    async def command(*options: str) -> tuple[int, str]:
        redis = ("--redis", cluster.config.index.redis_url)
        return await run_module("moonpool", "index", "verify", *redis, "--url", cluster.url, *options)

    async def all_agree() -> bool:
        # A conductor that the machine stops for a second is behind.
        code, text = await command()
        return (code, "prefill-0" in text) == (0, True)

    await eventually(all_agree)
    ghosts = [BlockKey(bytes([number]) * 16) for number in range(5)]
    epoch = (await index.nodes())["decode-1"].epoch
    await index.publish("decode-1", epoch, stored=[(ghost, Tier.POOL) for ghost in ghosts])
    code, text = await command()
    assert code == 1, text
    assert "--repair" in text
    code, text = await command("--repair")
    assert (code, "corrected: " in text) == (1, True), text
    await eventually(all_agree)
