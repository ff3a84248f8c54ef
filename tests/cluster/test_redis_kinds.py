"""A whole cluster on a Redis that Sentinel watches, and on a Redis Cluster."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest
from redis.asyncio import Redis
from redis.exceptions import RedisError

from moonpool.client import Client, Reply
from moonpool.kvstore.errors import IndexUnavailable
from moonpool.kvstore.index.redis.client import connect
from moonpool.kvstore.index.redis.kv_index import KVIndex
from moonpool.local.cluster import LocalCluster
from moonpool.local.redis_server import find_redis
from moonpool.runtime.service.tied_command import tied_command
from tests.cluster.conftest import eventually, small_config
from tests.forked import run_module
from tests.kvstore.redis_servers import Server, free_ports

SERVICE = "index"


@asynccontextmanager
async def serving(redis_url: str, directory: Path) -> AsyncIterator[tuple[LocalCluster, Client, KVIndex]]:
    config = small_config()
    config = replace(
        config,
        index=replace(config.index, redis_url=redis_url),
        cluster=replace(config.cluster, prefill=1, decode=1),
    )
    redis = connect(redis_url)
    async with LocalCluster(config, directory=directory) as cluster, Client(cluster.url) as client:
        yield cluster, client, KVIndex(redis, config.index.namespace)
    await redis.aclose()


@asynccontextmanager
async def redis_servers(directory: Path, ports: list[int], *options: str) -> AsyncIterator[list[Server]]:
    async with AsyncExitStack() as stack:
        servers = []
        for port in ports:
            home = directory / str(port)
            home.mkdir()
            server = Server(home, "--port", str(port), *options)
            stack.push_async_callback(server.kill)
            await server.start()
            servers.append(server)
        yield servers


@asynccontextmanager
async def sentinel(directory: Path, port: int, master: int) -> AsyncIterator[None]:
    """One that calls a server dead after half a second."""
    file = directory / "sentinel.conf"
    file.write_text(
        f"port {port}\ndir {directory}\n"
        f"sentinel monitor {SERVICE} 127.0.0.1 {master} 1\n"
        f"sentinel down-after-milliseconds {SERVICE} 500\n"
        f"sentinel failover-timeout {SERVICE} 3000\n"
    )
    command = tied_command([str(find_redis().path), str(file), "--sentinel"])
    with (directory / "sentinel.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(*command, stdout=log, stderr=log)
    try:
        yield
    finally:
        process.kill()
        await process.wait()


async def ask(client: Client, prompt: str) -> Reply:
    reply = Reply()
    async for _ in client.complete(prompt * 12, reply, max_tokens=8, temperature=0):
        pass
    return reply


async def test_publishing_resumes_on_the_server_that_sentinel_chose(tmp_path: Path) -> None:
    first, second, watcher = free_ports(3)
    async with redis_servers(tmp_path, [first, second]) as (master, follower):
        replica, ask_sentinel = connect(follower.url), connect(f"redis://127.0.0.1:{watcher}")
        await replica.replicaof("127.0.0.1", first)
        async with sentinel(tmp_path, watcher, first):

            async def watched() -> bool:
                try:
                    return int((await ask_sentinel.sentinel_master(SERVICE))["num-slaves"]) == 1
                except RedisError:  # it has not begun to listen
                    return False

            await eventually(watched)
            url = f"redis+sentinel://127.0.0.1:{watcher}/{SERVICE}"
            async with serving(url, tmp_path) as (cluster, client, index):
                said = await ask(client, "In the beginning was the index ")

                async def published() -> set[object]:
                    return set((await index.snapshot()).get("prefill-0", {}))

                await eventually(published)
                before = await published()
                await master.kill()
                # Serving does not wait for whoever is elected.
                assert (await ask(client, "In the beginning was the index ")).text == said.text
                await ask(client, "And the master was without form, and void ")

                async def elected() -> bool:
                    try:
                        return (await replica.info("replication"))["role"] == "master"
                    except RedisError:  # Sentinel closes the connections of a server it promotes
                        return False

                await eventually(elected)

                async def published_anew() -> bool:
                    try:
                        return before < await published()
                    except (RedisError, IndexUnavailable):  # our client asked the dead one
                        return False

                await eventually(published_anew)
                async with aiohttp.ClientSession() as session:

                    async def whole() -> bool:
                        async with session.get(f"{cluster.url}/readyz") as answer:
                            return (await answer.json())["status"] == "ready"

                    await eventually(whole)
                await ask(client, "And a new one was elected ")
        await replica.aclose()
        await ask_sentinel.aclose()


@pytest.mark.slow  # tests/kvstore/test_cluster.py has the index on two masters
async def test_a_cluster_of_three_masters_holds_the_index(tmp_path: Path) -> None:
    ports = free_ports(3)
    cuts = (0, 5461, 10923, 16384)
    async with redis_servers(tmp_path, ports, "--cluster-enabled", "yes") as servers:
        shards = [connect(server.url) for server in servers]
        for shard, first, end in zip(shards, cuts, cuts[1:], strict=False):
            await shard.execute_command("CLUSTER", "ADDSLOTS", *range(first, end))
        for port in ports[1:]:
            await shards[0].execute_command("CLUSTER", "MEET", "127.0.0.1", port)

        async def agreed() -> bool:
            return all([await sees_all(shard) for shard in shards])

        await eventually(agreed)
        url = f"redis+cluster://127.0.0.1:{ports[0]},127.0.0.1:{ports[1]}"
        async with serving(url, tmp_path) as (_, client, index):
            prompt = "In the beginning were three masters "
            said = await ask(client, prompt)

            async def published() -> object:
                held = await index.snapshot()
                return held.get("prefill-0") and held.get("decode-0")

            await eventually(published)
            again = await ask(client, prompt)
            assert again.text == said.text
            assert (await client.timeline(again.id))["summary"]["cached_tokens"] > 0
            code, text = await run_module("moonpool", "index", "verify", "--redis", url)
            assert code == 0, text
        for shard in shards:
            await shard.aclose()


async def sees_all(shard: Redis) -> bool:
    info = await shard.execute_command("CLUSTER", "INFO")
    facts = info if isinstance(info, dict) else dict(line.split(":") for line in info.decode().split())
    return facts["cluster_state"] == "ok" and int(facts["cluster_known_nodes"]) == 3
