"""Two regions in one cluster: a tenant confined to one of them, and the loss of that region."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from moonpool.local.cluster import LocalCluster
from tests.cluster.conftest import eventually, kill, small_config

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPT = "And it came to pass in those days that the word of the LORD came unto "
# The conductor and both-0 are in us, prefill-0 and decode-0 in eu.
EU = {"prefill-0", "decode-0"}
TENANTS = """
[free]
keys = ["sk-free"]
[acme]
keys = ["sk-acme"]
regions = ["us"]
[berg]
keys = ["sk-berg"]
regions = ["eu"]
"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalCluster]:
    directory: Path = tmp_path_factory.mktemp("regions")
    file = directory / "tenants.toml"
    file.write_text(TENANTS)
    config = small_config()
    eu = ("node.region=eu", "node.zone=a")
    config = replace(
        config,
        node=replace(config.node, region="us"),
        conductor=replace(
            config.conductor, tenants_path=str(file), region_links=("eu:us rtt_ms=2000 price_gb=0.02",)
        ),
        cluster=replace(config.cluster, prefill=1, decode=1, both=1, prefill_options=eu, decode_options=eu),
    )
    async with LocalCluster(config, directory=directory) as running:
        yield running


def headers(tenant: str, **more: str) -> dict[str, str]:
    return {"Authorization": f"Bearer sk-{tenant}", "x-moonpool-explain": "1", **more}


def nodes_of(answer: dict[str, Any]) -> set[str]:
    placements = [one["placement"] for one in answer["moonpool"][0]["placements"]]
    return {one[stage] for one in placements for stage in ("prefill", "decode") if one[stage]}


async def ask(cluster: LocalCluster, tenant: str, prompt: str, **more: str) -> tuple[int, dict[str, Any]]:
    body = {"prompt": prompt, "max_tokens": 8, "temperature": 0}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{cluster.url}/v1/completions", json=body, headers=headers(tenant, **more)) as response,
    ):
        return response.status, await response.json()


async def test_regions_of_all_processes_are_listed(cluster: LocalCluster) -> None:
    async with cluster.client() as client:
        found = await client.cluster()
        fleet = await client.fleet()
    regions = {"prefill-0": ("eu", "a"), "decode-0": ("eu", "a"), "both-0": ("us", "")}
    assert {one["node_id"]: (one["region"], one["zone"]) for one in found["nodes"]} == regions
    assert {one["node_id"]: (one["region"], one["zone"]) for one in fleet["nodes"]} == regions
    assert found["facts"]["region"] == "us"


async def test_a_confined_tenant_leaves_nothing_elsewhere(cluster: LocalCluster) -> None:
    # The header says that it is far from its own region, and near idle nodes elsewhere.
    for number in range(4):
        status, answer = await ask(cluster, "acme", f"{number} {PROMPT * 4}", **{"x-moonpool-region": "eu"})
        assert status == 200 and nodes_of(answer) == {"both-0"}, answer

    async def published() -> bool:
        async with cluster.client() as client:
            blocks = {one["node_id"]: one["num_index_blocks"] for one in (await client.cluster())["nodes"]}
        assert not any(blocks[name] for name in EU)
        return blocks["both-0"] > 8

    await eventually(published)
    status, answer = await ask(cluster, "berg", PROMPT)
    assert (status, answer["error"]["code"]) == (503, "outside_regions")
    assert "tenant berg is confined to eu, and this conductor is in us" in answer["error"]["message"]
    status, answer = await ask(cluster, "free", PROMPT, **{"x-moonpool-region": "eu"})
    assert status == 200 and nodes_of(answer) == EU
    status, answer = await ask(cluster, "free", PROMPT)
    assert status == 200 and nodes_of(answer) == {"both-0"}, "without the header: where the conductor is"


async def test_requests_go_on_elsewhere_when_a_region_is_lost_and_confined_ones_do_not(
    cluster: LocalCluster,
) -> None:
    """The last test: a region is gone."""
    body = {"prompt": PROMPT, "max_tokens": 400, "temperature": 0, "ignore_eos": True, "timeout": 60}
    url, texts = f"{cluster.url}/v1/completions", list[str]()
    last: dict[str, Any] = {}
    async with aiohttp.ClientSession() as session:
        async with session.post(url, json=body, headers=headers("free")) as response:
            whole = await response.json()
            assert nodes_of(whole) == {"both-0"}
        async with session.post(url, json={**body, "stream": True}, headers=headers("free")) as response:
            assert response.status == 200
            async for line in response.content:
                if line.startswith(b"data: {"):
                    last = json.loads(line.removeprefix(b"data: "))
                    texts += [choice["text"] for choice in last["choices"]]
                    if len(texts) == 3:
                        kill(cluster, "both-0")
    assert "".join(texts) == whole["choices"][0]["text"]
    after = nodes_of(last) - {"both-0"}
    assert after and after <= EU
    status, answer = await ask(cluster, "acme", PROMPT)
    assert (status, answer["error"]["code"]) == (503, "no_nodes")
    assert "tenant acme is confined to us" in answer["error"]["message"]
