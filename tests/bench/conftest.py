from __future__ import annotations

from collections.abc import AsyncIterator

import pytest_asyncio

from tests.bench.fake_server import FakeServer


@pytest_asyncio.fixture
async def fake() -> AsyncIterator[FakeServer]:
    async with FakeServer().running() as server:
        yield server
