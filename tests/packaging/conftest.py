from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio

from moonpool.local.redis_server import RedisServer


@pytest_asyncio.fixture
async def redis_url(tmp_path: Path) -> AsyncIterator[str]:
    """A Redis of its own, at a Unix socket."""
    server = RedisServer(tmp_path)
    await server.start()
    yield server.url
    await server.stop()
