"""A cluster whose processes listen at the loopback address of IPv6."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import aiohttp

from moonpool.client import Client, Reply
from moonpool.local.cluster import LocalCluster
from moonpool.runtime.observing.metrics_server import metrics_headers
from moonpool.runtime.security.process import Security
from moonpool.runtime.security.roles import Caller
from tests.cluster.conftest import nodes, small_config


async def test_a_cluster_serves_at_ipv6(tmp_path: Path) -> None:
    config = small_config()
    config = replace(
        config,
        cluster=replace(config.cluster, prefill=1, decode=1),
        conductor=replace(config.conductor, host="::1"),
        node=replace(config.node, host="::1"),
        transfer=replace(config.transfer, tcp=replace(config.transfer.tcp, host="::1")),
    )
    async with LocalCluster(config, directory=tmp_path) as cluster:
        assert cluster.url.startswith("http://[::1]:")
        me = Security(cluster.config.security, Caller("operator", "a test"), serves=False)
        key = metrics_headers(me)
        async with Client(cluster.url) as client, aiohttp.ClientSession() as session:
            reply = Reply()
            assert [piece async for piece in client.complete("In the", reply, max_tokens=4)]
            pages = [node["metrics_url"] for node in (await nodes(client)).values()]
            async with session.get(f"{cluster.url}/v1/prometheus-targets") as response:
                targets = [target for found in await response.json() for target in found["targets"]]
            assert sorted(pages) == sorted(f"http://{target}/metrics" for target in targets)
            for page in (*pages, f"{cluster.url}/metrics"):
                assert page.startswith("http://[::1]:")
                async with session.get(page, headers=key) as response:
                    assert response.status == 200
