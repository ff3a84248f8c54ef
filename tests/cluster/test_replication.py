"""A node asked to keep a copy reads it from where it is, and the index knows."""

from __future__ import annotations

import re

import aiohttp
import pytest

from moonpool.client import Client, Reply
from moonpool.kvstore.blocks import keys as block_keys
from moonpool.kvstore.index.redis.client import connect
from moonpool.kvstore.index.redis.kv_index import KVIndex
from moonpool.local.cluster import LocalCluster
from moonpool.protos import node_pb2, node_pb2_grpc
from moonpool.runtime import rpc
from tests.cluster.conftest import eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_a_prefill_node_pulls_a_chain_from_another(cluster: LocalCluster, client: Client) -> None:
    redis = connect(cluster.config.index.redis_url)
    index = KVIndex(redis, cluster.config.index.namespace)
    before = await index.snapshot()
    reply = Reply()
    async for _ in client.complete("Behold, a copy of this is wanted elsewhere. " * 40, reply, max_tokens=1):
        pass
    source = (await client.timeline(reply.id))["summary"]["prefill_node"]
    target = "prefill-1" if source == "prefill-0" else "prefill-0"

    async def published() -> bool:
        return len((await index.snapshot())[source]) > len(before[source])

    await eventually(published)
    held = (await index.snapshot())[source]
    # One prompt's blocks, in the order in which they were published.
    chain = [key for key in held if key not in before[source]]
    records = await index.nodes()
    address = node_pb2.KvAddress.FromString(records[source].kv_address)
    async with rpc.channel(records[target].rpc_address) as channel:
        stub = node_pb2_grpc.NodeStub(channel)
        request = node_pb2.ReplicateRequest(source=address, keys=block_keys.pack(chain))
        done = await stub.Replicate(request)
        assert done.num_blocks == done.num_read == len(chain)
        assert done.nbytes == len(chain) * address.block_nbytes

        async def copied() -> bool:
            return set(chain) <= (await index.snapshot())[target].keys()

        await eventually(copied)
        # How fast that was is what the conductor's estimates of the two go by.
        assert done.nbytes >= 1 << 20

        async def told() -> bool:
            nodes = {node["node_id"]: node for node in (await client.cluster())["nodes"]}
            return bool(nodes[target]["links_nbytes_per_s"].get(source, 0) > 0)

        await eventually(told)
        async with aiohttp.ClientSession() as session, session.get(records[target].metrics_url) as answer:
            page = await answer.text()
        for name in ("bytes_total", "spans_total", "batch_seconds_count", "bandwidth_bytes_per_second"):
            found = re.search(rf'^moonpool_transfer_{name}{{.*direction="read".*}} (.*)$', page, re.M)
            assert found is not None and float(found[1]) > 0, name
        assert 'moonpool_transfer_in_flight_bytes{direction="read"} 0' in page
        for name in ("failures_total", "retries_total", "checksum_mismatches_total"):
            assert f"# HELP moonpool_transfer_{name}" in page
        # Asked again, there is nothing left to read.
        again = await stub.Replicate(request)
        assert (again.num_blocks, again.num_read) == (len(chain), 0)
        # What the source has not got cannot be copied, and is no error.
        request.keys = block_keys.pack([b"n" * 16])
        nothing = await stub.Replicate(request)
        assert (nothing.num_blocks, nothing.num_read) == (0, 0)
    await redis.aclose()
