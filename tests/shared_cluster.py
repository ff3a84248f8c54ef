"""A cluster that several modules have in common, in whatever folder they are."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from moonpool.local.cluster import LocalCluster


@contextmanager
def running(make: Callable[[], LocalCluster]) -> Iterator[LocalCluster]:
    """A cluster whose loop is in a thread of its own, because the modules' loops end before it does."""

    async def start() -> LocalCluster:
        cluster = make()
        await cluster.start()
        return cluster

    loop = asyncio.new_event_loop()
    # The kernel ends the processes when the thread ends that started them.
    thread = threading.Thread(target=loop.run_forever, name="shared-cluster")
    thread.start()
    try:
        cluster = asyncio.run_coroutine_threadsafe(start(), loop).result()
        yield cluster
        asyncio.run_coroutine_threadsafe(cluster.stop(), loop).result()
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@pytest.fixture(scope="session")
def shared_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """Redis, a conductor, two prefill and two decode nodes, for all modules that leave them as they are: that
    ask them, and neither end nor start them. ``tests/shared_out.py`` keeps those modules together.
    """
    # Here: where only kernels are tested there need be none of what a cluster needs.
    from moonpool.local.cluster import LocalCluster
    from tests.cluster.conftest import small_config

    with running(
        lambda: LocalCluster(small_config(), directory=tmp_path_factory.mktemp("shared"))
    ) as cluster:
        yield cluster
