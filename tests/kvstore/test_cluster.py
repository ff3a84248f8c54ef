"""The index on a Redis Cluster: every call stays on one shard and declares its keys."""

from __future__ import annotations

import asyncio
from pathlib import Path

from moonpool.kvstore.index.mirror import IndexMirror
from moonpool.kvstore.index.redis.client import connect
from moonpool.kvstore.index.redis.kv_index import KVIndex
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
            await until(lambda shard=shard: is_ok(shard))
        client = connect(f"redis+cluster://127.0.0.1:{ports[0]}")
        # One namespace on each shard.
        for namespace in ("one", "two", "three"):
            index = KVIndex(client, namespace)
            mirror = IndexMirror(index)
            await mirror.start()
            node = await FakeNode(index, "a").start()
            node.hold(2000)
            await node.settled()
            await mirror.caught_up()
            assert mirror.longest_prefix(chain(3000)) == {"a": 2000}
            assert await index.snapshot() == {"a": node.held}
            await node.publisher.close()
            await mirror.caught_up()
            assert mirror.nodes == {}
            await mirror.close()
        assert all([await shard.dbsize() for shard in shards])
        await client.aclose()
    finally:
        await asyncio.gather(*(shard.aclose() for shard in shards), *(server.kill() for server in servers))


async def is_ok(shard: object) -> bool:
    info = await shard.execute_command("CLUSTER", "INFO")  # type: ignore[attr-defined]
    text = info if isinstance(info, dict) else dict(line.split(":") for line in info.decode().split())
    return text["cluster_state"] == "ok" and int(text["cluster_known_nodes"]) == 2
