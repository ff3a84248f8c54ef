"""Replicas take requests each for itself, and are shown as the one node they are."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from io import StringIO
from typing import Any

import numpy as np
from rich.console import Console

from moonpool.commands.status import cluster_view
from moonpool.conductor.observing.replica_groups import holders
from moonpool.kvstore.blocks.keys import chain
from moonpool.runtime.replicas.identity import Replica
from tests.conductor.core_nodes import (
    MODEL,
    Cluster,
    RedisProcess,
    continuation,
    request,
    running,
)


async def add_replicas(cluster: Cluster, node_id: str, count: int) -> None:
    for number in range(count):
        replica = Replica(node_id, number, count, node_pid=17, metrics_url="http://node/metrics")
        node = await cluster.add(replica.replica_id)
        node.record = replace(node.record, replica=replica)
        await node.announce()
    await cluster.until(lambda: node_id in shown(cluster) and shown(cluster)[node_id]["state"] == "ready")


def shown(cluster: Cluster) -> dict[str, dict[str, Any]]:
    return {node["node_id"]: node for node in cluster.conductor.cluster()["nodes"]}


async def test_replicas_are_one_node_to_those_who_look(redis: RedisProcess) -> None:
    async with running(redis.url, "d0", namespace="look") as cluster:
        await add_replicas(cluster, "p0", 2)
        nodes = shown(cluster)
        assert nodes.keys() == {"d0", "p0"}
        node = nodes["p0"]
        assert [one["node_id"] for one in holders(node)] == ["p0.0", "p0.1"]
        assert [one["node_id"] for one in holders(nodes["d0"])] == ["d0"]
        assert node["load"]["num_blocks"] == 2 * 4096
        assert node["tiers"][0]["num_blocks"] == 2 * 4096
        assert (node["pid"], node["ranks"], node["metrics_url"]) == (17, "dp 2", "http://node/metrics")
        assert cluster.conductor.ready() == (True, [])
        console = Console(width=200, record=True, file=StringIO())
        console.print(cluster_view("here", cluster.conductor.cluster()))
        lines = [line.split()[:3] for line in console.export_text().splitlines()]
        assert ["p0", "prefill", "ready"] in lines
        assert ["p0.1", "prefill", "ready"] in lines
        # While one is away the node is there, and what lacks is said.
        await cluster.nodes["p0.1"].leave()
        await cluster.until(lambda: len(holders(shown(cluster)["p0"])) == 1)
        assert shown(cluster)["p0"]["state"] == "partial"
        assert cluster.conductor.ready() == (True, ["node p0 has 1 of its 2 replicas"])
        assert cluster.conductor.counts().num_missing_replicas == {"prefill": 1}
        console.print(cluster_view("here", cluster.conductor.cluster()))
        assert "1 of 2 serve" in console.export_text()


async def test_requests_go_where_their_prefix_is_and_else_spread(redis: RedisProcess) -> None:
    async with running(redis.url, namespace="spread") as cluster:
        await add_replicas(cluster, "p0", 2)
        await add_replicas(cluster, "d0", 2)
        prompts = [[number * 50 + token for token in range(40)] for number in range(8)]
        answers = await asyncio.gather(
            *(cluster.generate(request(f"r{number}", prompt)) for number, prompt in enumerate(prompts))
        )
        assert answers == [continuation(prompt, 8) for prompt in prompts]
        # Each its share on an idle machine; on a busy one a replica may look slow.
        assert all(node.works for node in cluster.nodes.values())
        root = cluster.conductor._deps.registry.root_key("")
        assert root is not None
        prompt = list(range(1000, 3000))
        keys = chain(root, np.array(prompt), MODEL.block_size)
        cluster.nodes["p0.1"].hold(keys)
        await cluster.nodes["p0.1"].publisher.flush()
        await cluster.until(lambda: shown(cluster)["p0"]["num_index_blocks"] == len(keys))
        cluster.nodes["p0.0"].works.clear()
        for number in range(3):
            await cluster.generate(request(f"again{number}", prompt))
        assert not cluster.nodes["p0.0"].works
