"""When a cluster is ready its nodes are connected, so that the first request pays for no connection."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations
from pathlib import Path

import psutil
import pytest

from moonpool.local.cluster import LocalCluster
from moonpool.runtime.rpc.frames import socket_name
from moonpool.runtime.service.child import Child
from tests.cluster.conftest import small_config


def port_of(child: Child, name: str) -> int:
    return int(child.ready[name].rpartition(":")[2].partition("/")[0])


@pytest.mark.slow
async def test_each_node_is_connected_to_each_other_one(tmp_path: Path) -> None:
    config = small_config()
    # Over TCP, because connections to a Unix socket do not tell who made them.
    config = replace(config, transfer=replace(config.transfer, transports=("tcp",)))
    async with LocalCluster(config, directory=tmp_path) as cluster:
        nodes = cluster.nodes
        seen = {node.name: psutil.Process(node.pid).net_connections("tcp") for node in nodes}
        local = {node.name: psutil.Process(node.pid).net_connections("unix") for node in nodes}
    assert len(nodes) == 4
    listening = {
        name: {one.laddr.port for one in connections if one.status == psutil.CONN_LISTEN}
        for name, connections in seen.items()
    }
    for node in nodes:
        calls = "@" + socket_name(node.ready["rpc_address"])[1:]
        # Its own, of each other node, and of the conductor.
        ends = [one.laddr for one in local[node.name] if one.laddr == calls]
        assert len(ends) == 1 + len(nodes), f"{node.name} has no connection of some node for calls"
    for one, other in permutations(nodes, 2):
        rpc = {port_of(other, "rpc_address")}
        memory = listening[other.name] - rpc - {port_of(other, "metrics_url")}
        assert memory
        reached = {
            connection.raddr.port
            for connection in seen[one.name]
            if connection.status == psutil.CONN_ESTABLISHED
        }
        assert reached & memory, f"{one.name} reads no memory of {other.name} yet"
