"""Nodes and clients that die, disks that come back, bytes that rot."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from moonpool.store.errors import NoStoreNodes, PutFailed
from tests.store_node.conftest import StoreCluster

rng = np.random.default_rng(11)


async def test_copies_survive_a_node(cluster: StoreCluster) -> None:
    value = rng.standard_normal(300_000)
    await asyncio.gather(cluster.start("a"), cluster.start("b"))
    async with cluster.client() as store:
        await store.put("kept", value, copies=2, node="b")
        await store.put("single", value, node="a")
        stat = await store.stat("kept")
        assert stat is not None
        assert stat.nodes == ("a", "b")
        with pytest.raises(PutFailed, match="3 were asked for"):
            await store.put("three", value, copies=3)
        assert await store.replicate("single", 2) == ("a", "b")
        await cluster.kill("b")
        for name in ("kept", "single"):
            np.testing.assert_array_equal(await store.get(name), value)


async def test_a_cluster_without_store_nodes_says_so(cluster: StoreCluster) -> None:
    async with cluster.client() as store:
        with pytest.raises(NoStoreNodes, match="moonpool store-node"):
            await store.get("x")
        # One that comes is found.
        await cluster.start("a")
        assert await store.get("x") is None
