"""The index on a Redis Cluster: every call stays on one shard and declares its keys."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from moonpool.kvstore.errors import IndexUnavailable
from moonpool.kvstore.index.mirror import IndexMirror
from moonpool.kvstore.index.redis.client import connect
from moonpool.kvstore.index.redis.kv_index import KVIndex
from moonpool.kvstore.objects.records import Records
from moonpool.protos import store_pb2
from tests.kvstore.nodes import FakeNode, chain
from tests.kvstore.redis_servers import Server, free_ports, until


async def test_an_index_on_two_shards_of_a_cluster_works(directory: Path) -> None:
    ports = free_ports(2)
    servers = []
    for port in ports:
        home = directory / str(port)
        home.mkdir()
        servers.append(Server(home, "--port", str(port), "--cluster-enabled", "yes"))
    shards = [connect(server.url) for server in servers]
    try:
        for server in servers:
            await server.start()
        for shard, slots in zip(shards, (range(8192), range(8192, 16384)), strict=True):
            await shard.execute_command("CLUSTER", "ADDSLOTS", *slots)
        await shards[0].execute_command("CLUSTER", "MEET", "127.0.0.1", ports[1])
        for shard in shards:
            await until(lambda shard=shard: is_ok(shard, 2))
        client = connect(f"redis+cluster://127.0.0.1:{ports[0]}")
        # One namespace on each shard.
        for namespace in ("one", "two", "three"):
            index = KVIndex(client, namespace, timeout_s=60.0)
            mirror = IndexMirror(index)
            await mirror.start()
            node = await FakeNode(index, "a").start()
            node.hold(2000)
            await node.settled()
            await mirror.caught_up()
            assert mirror.longest_prefix(chain(3000)) == {"a": 2000}
            assert await index.snapshot() == {"a": node.held}
            await node.publisher.close()
            await until(lambda mirror=mirror: asyncio.sleep(0.001, not mirror.nodes))
            await mirror.close()
        assert all([await shard.dbsize() for shard in shards])
        # Records of objects are spread over the shards.
        records = Records(KVIndex(client, "one", timeout_s=60.0), restoring_s=1.0)
        infos = [store_pb2.ObjectInfo(key=bytes([n]) * 16, storage=n + 1, name=str(n)) for n in range(40)]
        put = [store_pb2.ObjectRecord(info=info, owner=bytes(16), places=["a"]) for info in infos]
        await records.put([(record, 0) for record in put])
        found = await records.read([(bytes(16), info.key) for info in infos])
        assert [record.storage for record in found if record is not None] == list(range(1, 41))
        cursor, listed = 0, set[int]()
        while True:
            page, cursor = await records.scan(cursor, bytes(16))
            listed |= {record.storage for record in page}
            if not cursor:
                break
        assert listed == set(range(1, 41))
        removed = await records.remove([((bytes(16), info.key), info.storage) for info in infos])
        assert all(record is not None for record, _ in removed)
        await client.aclose()
    finally:
        await asyncio.gather(*(shard.aclose() for shard in shards), *(server.kill() for server in servers))


async def is_ok(shard: object, num_shards: int) -> bool:
    info = await shard.execute_command("CLUSTER", "INFO")  # type: ignore[attr-defined]
    text = info if isinstance(info, dict) else dict(line.split(":") for line in info.decode().split())
    return text["cluster_state"] == "ok" and int(text["cluster_known_nodes"]) == num_shards


async def test_a_cluster_that_is_away_is_waited_for(directory: Path) -> None:
    """redis-py says so with an exception of another family than a single server's."""
    (port,) = free_ports(1)
    server = Server(directory, "--port", str(port), "--cluster-enabled", "yes")
    await server.start()
    shard = connect(server.url)
    client = connect(f"redis+cluster://127.0.0.1:{port}")
    try:
        await shard.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
        await until(lambda: is_ok(shard, 1))
        index = KVIndex(client, "one")
        node = await FakeNode(index, "a").start()
        node.hold(5)
        await node.settled()
        await server.kill()
        node.hold(7)
        await until(lambda: asyncio.sleep(0.001, not node.publisher.connected))
        with pytest.raises(IndexUnavailable):
            await index.watch()
        assert node.publisher._task is not None and not node.publisher._task.done()
        await server.start()
        await until(lambda: asyncio.sleep(0.001, node.publisher.connected))
        await node.settled()
        assert await index.snapshot() == {"a": node.held}
        await node.publisher.close()
    finally:
        await shard.aclose()
        await client.aclose()
        await server.kill()
