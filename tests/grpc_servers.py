"""Every gRPC server that a test starts is stopped when its file is done.

One that still runs when it is collected keeps gRPC from ever shutting down: whichever test runs then hangs.
"""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Iterator
from typing import Any

import grpc.aio
import pytest

_running: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()  # to the test that started it


def pytest_configure() -> None:
    start, stop = grpc.aio.Server.start, grpc.aio.Server.stop

    @functools.wraps(start)
    async def started(server: Any) -> None:
        _running[server] = os.environ.get("PYTEST_CURRENT_TEST", "a fixture")
        await start(server)

    @functools.wraps(stop)
    async def stopped(server: Any, grace: float | None) -> None:
        await stop(server, grace)
        _running.pop(server, None)

    grpc.aio.Server.start = started  # type: ignore[method-assign]
    grpc.aio.Server.stop = stopped  # type: ignore[method-assign]


@pytest.fixture(scope="module", autouse=True)
def grpc_servers_are_stopped() -> Iterator[None]:
    before = set(_running)
    yield
    left = [test for server, test in _running.items() if server not in before]
    assert not left, f"gRPC servers still run: {left}"
