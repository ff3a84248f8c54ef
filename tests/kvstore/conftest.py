"""Real Redis servers for the index's tests."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from moonpool.kvstore.index.redis.client import connect
from moonpool.kvstore.index.redis.kv_index import KVIndex
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
    yield client
    await client.aclose()


@pytest.fixture
async def index(redis: Any) -> KVIndex:
    return KVIndex(redis, "test")
