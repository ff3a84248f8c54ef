"""Attacks through Redis and by addresses: forged nodes, and nodes at addresses that are none."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import grpc.aio
import pytest

from moonpool.kvstore.index.redis.client import connect
from moonpool.kvstore.index.redis.kv_index import KVIndex
from moonpool.kvstore.index.redis.node_record import NodeRecord
from moonpool.kvstore.index.redis.seal import Seals
from moonpool.protos import node_pb2, node_pb2_grpc
from moonpool.runtime import rpc
from tests.attack.conftest import Target, bearer


async def test_a_spoofed_node_gets_no_connection_and_no_prompt(target: Target) -> None:
    """Whoever writes to Redis without the key: the conductor connects to none of its addresses."""
    config = target.cluster.config
    with socket.create_server(("127.0.0.1", 0)) as trap:
        address = f"127.0.0.1:{trap.getsockname()[1]}"
        redis = connect(config.index.redis_url)
        index = KVIndex(redis, config.index.namespace, seals=Seals(b"the key of another cluster......"))
        for role in ("prefill", "decode", "store"):
            await index.register(NodeRecord(f"evil-{role}", 1, role, rpc_address=address), 5.0)
        namespace = f"{{{config.index.namespace}}}"
        await redis.zadd(f"{namespace}:conductors", {"evil": 9e15})
        await redis.hset(f"{namespace}:facts", "evil", b'{"peer_address": "%s"}' % address.encode())
        await target.serves()
        async with target.http() as http, http.get("/v1/cluster", headers=bearer()) as answer:
            cluster = await answer.json()
        assert not [node for node in cluster["nodes"] if node["node_id"].startswith("evil")]
        assert "evil" not in cluster["conductors"]
        await target.logged(event="refused", what="Redis", why="evil", process="conductor")
        trap.setblocking(False)
        with pytest.raises(BlockingIOError):
            trap.accept()
        await redis.zrem(f"{namespace}:conductors", "evil")
        await redis.aclose()


@pytest.mark.parametrize("scheme", ["unix:{path}", "unix://{path}", "unix:///{path}"])
async def test_an_address_is_a_host_and_a_port_and_nothing_else(tmp_path: Path, scheme: str) -> None:
    """gRPC would take a scheme in an address, and so reach any socket of this machine."""
    path, reached = tmp_path / "s", []
    with socket.socket(socket.AF_UNIX) as trap:
        trap.bind(str(path))
        trap.listen()
        trap.setblocking(False)
        loop = asyncio.get_running_loop()
        loop.add_reader(trap.fileno(), reached.append, trap)
        try:
            async with rpc.channel(scheme.format(path=path)) as channel:
                with pytest.raises(grpc.aio.AioRpcError):
                    await node_pb2_grpc.NodeStub(channel).Status(node_pb2.StatusRequest(), timeout=1)
        finally:
            loop.remove_reader(trap.fileno())
    assert not reached
