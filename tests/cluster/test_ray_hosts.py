"""A node whose ranks are on two machines of a Ray cluster."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from moonpool.local.cluster import LocalCluster
from moonpool.runtime.config.options import FleetOptions
from tests.cluster.conftest import eventually, nodes, small_config
from tests.cluster.test_ray import answer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

_RANK = "--leader"


def of(raylet: int, word: str) -> list[int]:
    """The processes under a raylet with a word in their command line."""
    found = []
    for one in psutil.Process(raylet).children(recursive=True):
        try:
            if word in one.cmdline():
                found.append(one.pid)
        except psutil.NoSuchProcess:
            continue
    return found


async def test_ranks_are_spread_over_machines_and_come_back(
    raylets: tuple[str, list[int]], tmp_path: Path, shared_cluster: LocalCluster
) -> None:
    address, machines = raylets
    config = small_config()
    parallel = replace(config.engine.parallel, pp=2, hosts=2, listen=":0", trusted_network=True)
    config = replace(
        config,
        cluster=replace(config.cluster, prefill=0, decode=0, both=1),
        engine=replace(config.engine, parallel=parallel),
        fleet=FleetOptions(provider="ray", ray=address),
    )
    async with shared_cluster.client() as beside:
        expected = await answer(beside, "In the beginning")
    async with LocalCluster(config, directory=tmp_path) as cluster, cluster.client() as client:
        assert await answer(client, "In the beginning") == expected
        (node,) = (await nodes(client)).values()
        ((near, _), (far, (rank,))) = sorted(
            ((one, of(one, _RANK)) for one in machines), key=lambda one: len(one[1])
        )
        assert node["pid"] in of(near, "moonpool.node")

        # Its actor starts another, and the node begins another life.
        os.kill(rank, signal.SIGKILL)

        async def is_back() -> bool:
            found = (await nodes(client)).get(node["node_id"])
            return found is not None and found["state"] == "ready" and found["epoch"] != node["epoch"]

        await eventually(is_back, timeout_s=240)
        assert await answer(client, "In the beginning") == expected
        (another,) = of(far, _RANK)
        assert not psutil.pid_exists(rank)
        pids = [node["pid"], another]

    async def nothing() -> bool:
        return not any(psutil.pid_exists(pid) for pid in pids)

    await eventually(nothing)
