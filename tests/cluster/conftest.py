"""A real cluster: Redis, conductor, two prefill and two decode nodes as processes of their own."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from moonpool.client import Client
from moonpool.local.cluster import LocalCluster
from moonpool.runtime.config.options import Config


def small_config() -> Config:
    """Like the default one, with small pools and nothing on a fixed port."""
    config = Config()
    return replace(
        config,
        conductor=replace(config.conductor, port=0, request_timeout_s=60.0),
        engine=replace(config.engine, pool_nbytes=64 << 20),
        index=replace(config.index, lease_ttl_s=2.0),
    )


async def eventually(holds: Callable[[], Awaitable[object]], *, timeout_s: float = 60.0) -> None:
    """Wait until ``holds()`` is true; fails with what it last answered."""
    answer: object = None
    try:
        async with asyncio.timeout(timeout_s):
            # The state is in other processes: it can only be asked for.
            while not (answer := await holds()):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
    except TimeoutError:
        pytest.fail(f"not within {timeout_s:g} s: {holds.__name__}, last {answer!r}")


def kill(cluster: LocalCluster, name: str) -> None:
    """kill -9, for real."""
    os.kill(cluster.children[name].pid, signal.SIGKILL)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def own_cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalCluster]:
    directory: Path = tmp_path_factory.mktemp("cluster")
    async with LocalCluster(small_config(), directory=directory) as running:
        yield running


@pytest.fixture(scope="module")
def cluster(shared_cluster: LocalCluster) -> LocalCluster:
    """A module that breaks it says that it is its ``own_cluster``."""
    return shared_cluster


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(cluster: LocalCluster) -> AsyncIterator[Client]:
    async with Client(cluster.url) as connected:
        yield connected
