"""Store nodes as processes of their own, a Redis, and a client of them."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import pytest_asyncio

import moonpool
from moonpool.kvstore.index.redis.client import connect
from moonpool.kvstore.index.redis.kv_index import KVIndex
from moonpool.objects import StoreClient
from moonpool.runtime.service.child import Child
from tests.kvstore.redis_servers import Server

READY_TIMEOUT_S = 60.0


class StoreCluster:
    """A Redis and store nodes by name. ``start`` a node, ``kill`` it, start it again. ``namespace``: the file
    of a node's network namespace; empty: ours."""

    def __init__(
        self,
        directory: Path,
        redis: Server,
        namespace: Callable[[str], str] = lambda name: "",
    ) -> None:
        self.directory = directory
        self.redis = redis
        self.url = redis.url
        self.nodes: dict[str, Child] = {}
        self._namespace = namespace

    async def start(self, name: str, **options: object) -> Child:
        """``options``: ``store_node__object_nbytes=…`` for ``store_node.object_nbytes``."""
        child = self.nodes.get(name)
        if child is None:
            settings = {
                "index.redis_url": self.url,
                "index.lease_ttl_s": 2.0,
                "node.id": name,
                "node.host_id": name,
                "store.host.capacity_nbytes": "4MiB",
                "store.ssd.deadline_s": 60.0,
                "store_node.object_nbytes": "16MiB",
                "store_node.chunk_nbytes": "64KiB",
                **{key.replace("__", "."): value for key, value in options.items()},
            }
            namespace = self._namespace(name)
            within = ["tests.objects.in_namespace", namespace] if namespace else []
            command = [sys.executable, "-m", *within, "moonpool.kvstore.store_node"]
            for key, value in settings.items():
                command += ["--set", f"{key}={value}"]
            child = self.nodes[name] = Child(name, command, self.directory / f"{name}.log", sends_json=True)
        await child.start()
        await child.wait_ready(READY_TIMEOUT_S)
        return child

    async def kill(self, name: str) -> None:
        """kill -9, for real."""
        os.kill(self.nodes[name].pid, signal.SIGKILL)
        await self.nodes[name].wait()

    @asynccontextmanager
    async def client(self, **options: object) -> AsyncIterator[StoreClient]:
        async with moonpool.connect(self.url, **options) as client:
            yield client

    @asynccontextmanager
    async def index(self) -> AsyncIterator[KVIndex]:
        redis = connect(self.url)
        yield KVIndex(redis)
        await redis.aclose()

    def log(self, name: str) -> str:
        return (self.directory / f"{name}.log").read_text()


@asynccontextmanager
async def running() -> AsyncIterator[StoreCluster]:
    # pytest's tmp_path is too long for a Unix socket's address.
    with tempfile.TemporaryDirectory(prefix="sn") as path:
        server = Server(Path(path))
        await server.start()
        cluster = StoreCluster(Path(path), server)
        try:
            yield cluster
        finally:
            for child in cluster.nodes.values():
                child.kill()
                await child.wait()
            await server.kill()


@pytest.fixture
async def cluster() -> AsyncIterator[StoreCluster]:
    """A cluster of the test's own. No node runs yet."""
    async with running() as cluster:
        yield cluster


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared() -> AsyncIterator[StoreCluster]:
    """Nodes "a" and "b", for tests that leave them as they are."""
    async with running() as cluster:
        await asyncio.gather(cluster.start("a"), cluster.start("b"))
        yield cluster
