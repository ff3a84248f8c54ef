"""Real Redis servers for the index's tests."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from moonpool.kvstore.index.mirror import IndexMirror
from moonpool.kvstore.index.redis.client import connect
from moonpool.kvstore.index.redis.kv_index import KVIndex
from tests.kvstore.nodes import FakeNode
from tests.kvstore.redis_servers import Server


@pytest.fixture
def directory() -> Iterator[Path]:
    # pytest's tmp_path is too long for a Unix socket's address.
    with tempfile.TemporaryDirectory(prefix="kv") as path:
        yield Path(path)


@pytest.fixture
async def server(directory: Path) -> AsyncIterator[Server]:
    server = Server(directory)
    await server.start()
    try:
        yield server
    finally:
        await server.kill()


@pytest.fixture
async def redis(server: Server) -> AsyncIterator[Any]:
    client = connect(server.url)
    # Here a Redis that is slow is not one that is lost.
    client.connection_pool.connection_kwargs["socket_connect_timeout"] = 60.0
    yield client
    await client.aclose()


@pytest.fixture
async def index(redis: Any) -> KVIndex:
    return KVIndex(redis, "test", timeout_s=60.0)


@pytest.fixture
async def nodes(index: KVIndex) -> AsyncIterator[dict[str, FakeNode]]:
    """Two nodes with five blocks each."""
    nodes = {name: await FakeNode(index, name).start() for name in "ab"}
    for node in nodes.values():
        node.hold(5)
        await node.settled()
    yield nodes
    for node in nodes.values():
        await node.publisher.close()


@pytest.fixture
async def mirror(index: KVIndex, nodes: object) -> AsyncIterator[IndexMirror]:
    """A mirror of the index with ``nodes``; no task of it may have ended by itself."""
    mirror = IndexMirror(index, lease_ttl_s=10.0, tick_s=0.02)
    await mirror.start()
    yield mirror
    assert not any(task.done() for task in mirror._tasks)
    mirror._copy.blocks.check_integrity()
    await mirror.close()
