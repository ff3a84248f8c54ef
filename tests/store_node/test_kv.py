"""KV blocks on a store node outlive the nodes that computed them."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from grpc.aio import AioRpcError

from moonpool.client import Client, Reply
from moonpool.kvstore.blocks import keys as block_keys
from moonpool.kvstore.index.redis.client import connect
from moonpool.kvstore.index.redis.kv_index import KVIndex
from moonpool.local.cluster import LocalCluster
from moonpool.protos import node_pb2, node_pb2_grpc
from moonpool.runtime import rpc
from moonpool.runtime.config.options import ClusterOptions, SsdTierOptions, StoreOptions
from tests.cluster.conftest import eventually, small_config

# Longer than one durable write of a store node's disk.
PROMPT = "And the store kept what the others had forgotten. " * 128


async def complete(client: Client) -> tuple[str, dict[str, object]]:
    reply = Reply()
    async for _ in client.complete(PROMPT, reply, max_tokens=8, temperature=0):
        pass
    return reply.text, (await client.timeline(reply.id))["summary"]


@pytest.mark.parametrize("plan", ["tp=2", pytest.param("cp=2", marks=pytest.mark.slow)])
async def test_a_prefix_is_fetched_from_a_store_node_when_its_makers_are_gone(
    tmp_path: Path, plan: str
) -> None:
    on_disk = StoreOptions(ssd=SsdTierOptions(path=str(tmp_path), deadline_s=60.0))
    # The makers' blocks lie in parts, the store node's are whole.
    counts = ClusterOptions(prefill=1, decode=1, store=1, prefill_options=(f"engine.parallel.{plan}",))
    config = replace(small_config(), cluster=counts, store=on_disk)
    # It always fetches: the default computes where that is predicted to be faster.
    config = replace(config, conductor=replace(config.conductor, policy="kv-aware"))
    async with LocalCluster(config) as cluster, Client(cluster.url) as client:
        redis = connect(cluster.config.index.redis_url)
        index = KVIndex(redis, config.index.namespace)
        expected, first = await complete(client)
        assert first["cached_tokens"] == 0

        async def published() -> list[block_keys.BlockKey]:
            return list((await index.snapshot())["prefill-0"])

        await eventually(published)
        chain = await published()
        records = await index.nodes()
        source = node_pb2.KvAddress.FromString(records["prefill-0"].kv_address)
        async with rpc.channel(records["store-0"].rpc_address) as channel:
            stub = node_pb2_grpc.NodeStub(channel)
            request = node_pb2.ReplicateRequest(source=source, keys=block_keys.pack(chain))
            done = await stub.Replicate(request)
            assert done.num_blocks == done.num_read == len(chain)

            async def copied() -> bool:
                return set(chain) <= (await index.snapshot()).get("store-0", {}).keys()

            await eventually(copied)
            # Who has other keys than these finds, pins and ends nothing.
            lease = await stub.Lease(node_pb2.LeaseRequest(keys=block_keys.pack(chain), ttl_s=30.0))
            assert len(lease.blocks.offset) == len(chain)
            others = block_keys.pack([b"another tenant's"[:16]] * len(chain))
            probe = await stub.Lease(node_pb2.LeaseRequest(keys=others, ttl_s=30.0))
            assert (probe.lease_id, len(probe.blocks.offset)) == (0, 0)
            for guess in (*range(16), lease.lease_id - 1, lease.lease_id + 1):
                await stub.Release(node_pb2.ReleaseRequest(lease_id=guess))
            status = await stub.Status(node_pb2.StatusRequest())
            assert sum(tier.num_used_blocks for tier in status.tiers) == len(chain)
            await stub.Release(node_pb2.ReleaseRequest(lease_id=lease.lease_id))
            # It keeps one shape of blocks: another one is refused by name, and what it has stays.
            request.source.block_nbytes *= 2
            with pytest.raises(AioRpcError, match="KV blocks of layout"):
                await stub.Replicate(request)
            # The store node itself is started again: what it had is on its disk, and published anew.
            await cluster.children["store-0"].stop(20.0)

            async def left() -> bool:
                return "store-0" not in await index.snapshot()

            await eventually(left)
            await cluster.restart("store-0")
            await eventually(copied)
            for name in ("prefill-0", "decode-0"):
                os.kill(cluster.children[name].pid, signal.SIGKILL)
            for name in ("prefill-0", "decode-0"):
                await cluster.children[name].wait()
            await asyncio.gather(cluster.restart("prefill-0"), cluster.restart("decode-0"))

            async def back() -> bool:
                nodes = (await client.cluster())["nodes"]
                ready = {node["node_id"] for node in nodes if node["state"] == "ready"}
                return ready == {"prefill-0", "decode-0", "store-0"}

            await eventually(back)
            text, second = await complete(client)
            assert text == expected
            assert second["fetched_tokens"] == len(chain) * config.engine.block_size, second["detail"]
        await redis.aclose()
