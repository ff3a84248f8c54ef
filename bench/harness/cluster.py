"""A cluster on this machine for one benchmark."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from moonpool.local.cluster import LocalCluster
from moonpool.runtime.config.loading import load_config


@asynccontextmanager
async def local_cluster(sets: Sequence[str]) -> AsyncIterator[str]:
    """Start a cluster with options as ``key=value``; yields the URL of its API and stops it at the end."""
    async with LocalCluster(load_config(None, sets)) as cluster:
        yield cluster.url
