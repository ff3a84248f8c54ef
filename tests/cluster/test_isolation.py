"""One tenant never meets another's blocks: their keys begin elsewhere."""

from __future__ import annotations

import random

import numpy as np
import pytest

from moonpool.client import Client
from moonpool.conductor.admission.tenants import ANYONE
from moonpool.conductor.fleet.served_model import ServedModel
from moonpool.kvstore.blocks import keys as block_keys
from moonpool.kvstore.blocks.keys import BlockKey
from moonpool.kvstore.index.redis.client import connect
from moonpool.kvstore.index.redis.kv_index import KVIndex, replay
from moonpool.local.cluster import LocalCluster
from moonpool.protos import node_pb2, node_pb2_grpc
from moonpool.runtime import rpc
from moonpool.runtime.config.options import Config
from moonpool.runtime.security.process import Security
from moonpool.runtime.security.roles import Caller
from tests.cluster.conftest import eventually
from tests.lazily import Lazily

openai = Lazily("openai")

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_the_same_prompt_hits_for_its_own_tenant_and_for_nobody_else(
    cluster: LocalCluster, client: Client
) -> None:
    tokens = [random.Random(7).randrange(10, 1000) for _ in range(200)]
    api = openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0)

    async def cached(salt: str) -> int:
        answer = await api.completions.create(
            model=Config().model.served_name,
            prompt=tokens,
            max_tokens=1,
            temperature=0,
            extra_body={"cache_salt": salt} if salt else {},
        )
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        return int(answer.usage.prompt_tokens_details.cached_tokens or 0)

    assert await cached("ours") == 0

    async def ours_hits() -> bool:
        return await cached("ours") > 0

    await eventually(ours_hits)
    # Neither another salt, nor none, nor one that looks like it finds anything: not by a hit, not by a fetch.
    for other in ("theirs", "", "our", "ours "):
        assert await cached(other) == 0
    assert await cached("ours") > 0
    await api.close()


async def test_at_a_node_s_own_door_a_tenant_has_no_names_for_anothers_blocks(cluster: LocalCluster) -> None:
    config, tokens = cluster.config, [random.Random(8).randrange(10, 1000) for _ in range(200)]
    redis = connect(config.index.redis_url)
    records = await KVIndex(redis, config.index.namespace).nodes()
    await redis.aclose()
    model = ServedModel.from_checkpoint(
        config.model.directory, block_size=config.engine.block_size, name=config.model.served_name
    )
    record = records["prefill-0"]

    me = Security(config.security, Caller("operator", "a test"), serves=False)
    secret = me.derived_key("roots of tenants")

    def chain_of(tenant: bytes) -> list[BlockKey]:
        root = block_keys.root_key(
            model=record.model.encode(), layout=model.layouts()[record.layout], tenant=tenant
        )
        return block_keys.chain(root, np.array(tokens, np.int32), config.engine.block_size)

    api = openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0)
    await api.completions.create(
        model=config.model.served_name,
        prompt=tokens,
        max_tokens=1,
        temperature=0,
        extra_body={"cache_salt": "ours"},
    )
    await api.close()
    ours = chain_of(block_keys.tenant_secret(secret, ANYONE.salt("ours")))
    theirs = [
        chain_of(block_keys.tenant_secret(secret, ANYONE.salt("theirs"))),
        chain_of(b"ours"),  # who knows the salt, and not the cluster's key
        chain_of(ANYONE.salt("ours").encode()),
        chain_of(block_keys.tenant_secret(b"a key of another cluster", ANYONE.salt("ours"))),
    ]
    num_found = 0
    for node_id in ("prefill-0", "prefill-1"):
        async with rpc.channel(records[node_id].rpc_address) as channel:
            stub = node_pb2_grpc.NodeStub(channel)
            found = [await _check_door(stub, ours, one) for one in theirs]
            num_found += all(found)
    assert num_found == 1, "one of the nodes computed it"


async def _check_door(node: node_pb2_grpc.NodeAsyncStub, ours: list[BlockKey], theirs: list[BlockKey]) -> int:
    """All that a caller can do with keys, done with another tenant's. Returns whether our blocks are here."""

    async def held() -> set[BlockKey]:
        parts = [part.changes async for part in node.ListBlocks(node_pb2.ListBlocksRequest())]
        return set(replay(parts)) & set(ours)

    before = await held()
    if not before:
        return 0
    lease = await node.Lease(node_pb2.LeaseRequest(keys=block_keys.pack(ours), ttl_s=30.0))
    assert lease.lease_id
    assert len(lease.blocks.offset) == len(ours)

    async def num_pinned() -> int:
        return sum(tier.num_used_blocks for tier in (await node.Status(node_pb2.StatusRequest())).tiers)

    pinned = await num_pinned()
    assert pinned >= len(ours)
    # Not found, not read, not pinned; and the owner's lease is not ended by a guess.
    probe = await node.Lease(node_pb2.LeaseRequest(keys=block_keys.pack(theirs), ttl_s=30.0))
    assert (probe.lease_id, len(probe.blocks.offset)) == (0, 0)
    for guess in (*range(64), lease.lease_id - 1, lease.lease_id + 1):
        await node.Release(node_pb2.ReleaseRequest(lease_id=guess))
    assert await num_pinned() == pinned
    await node.Release(node_pb2.ReleaseRequest(lease_id=lease.lease_id))
    # Not evicted either: what only another tenant can name stays.
    gone = await node.Evict(node_pb2.EvictRequest(keys=block_keys.pack(theirs), num_blocks=len(theirs)))
    assert gone.num_blocks == 0
    assert await held() == before
    return 1
