"""Services of a benchmark: a private Redis, one of our daemons, a whole local cluster."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

from moonpool.bench.harness.child import Child, started
from moonpool.local.children import NODE_MODULE
from moonpool.local.cluster import LocalCluster
from moonpool.local.redis_server import RedisServer
from moonpool.runtime.config.loading import load_config


@asynccontextmanager
async def redis(url: str = "") -> AsyncIterator[str]:
    """The URL of the server that was named, or of one that runs during the block."""
    if url:
        yield url
        return
    with tempfile.TemporaryDirectory(prefix="kv") as directory:
        async with RedisServer(Path(directory)) as server:
            yield server.url


@asynccontextmanager
async def local_cluster(
    sets: Sequence[str], *, supervised: bool = False, node_module: str = NODE_MODULE
) -> AsyncIterator[str]:
    """The URL of the API of a cluster on this machine, with options as ``key=value``.

    The conductor listens on a free port, unless one is set: the default may be in use. ``supervised``: it may
    start and stop nodes. ``node_module``: that nodes run.
    """
    config = load_config(None, ("conductor.port=0", *sets))
    running = LocalCluster(config, restart=supervised, supervises=supervised, node_module=node_module)
    async with running:
        yield running.url


def daemon(module: str, sets: Sequence[str]) -> AbstractAsyncContextManager[Child]:
    """One of our daemons, by its module; ``ready`` has its addresses."""
    options = [word for item in sets for word in ("--set", item)]
    return started(module, [sys.executable, "-m", module, *options])
