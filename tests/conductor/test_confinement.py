"""Tenants that are confined to regions: what is refused because of it, on scripted nodes."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from moonpool.conductor.access.keys import ApiKeys
from moonpool.conductor.admission.confinement import refusals
from moonpool.conductor.admission.tenants import Tenant
from moonpool.conductor.api.errors import as_api_error
from moonpool.conductor.errors import MigrationFailed, NoNodes, OutsideRegions
from moonpool.conductor.request import CacheHint
from moonpool.runtime.config.options import AuditOptions
from moonpool.runtime.errors import ConfigError
from moonpool.runtime.observing import audit
from tests.conductor.core_nodes import (
    PROMPT,
    Cluster,
    RedisProcess,
    ScriptedNode,
    continuation,
    request,
    running,
)

ACME = Tenant("acme", regions=frozenset({"eu"}))


@asynccontextmanager
async def two_regions(redis: RedisProcess, namespace: str, region: str = "eu") -> AsyncIterator[Cluster]:
    """Two nodes of each role in us, one in eu. The conductor is in ``region``."""
    async with running(redis.url, namespace=namespace, region=region, replicate_nbytes_per_s=0) as cluster:
        for name in ("p0", "p1", "p2", "d0", "d1", "d2"):
            await cluster.add(name, region="eu" if name.endswith("0") else "us")
        yield cluster


def num_refused(what: str) -> float:
    return refusals.labels(what)._value.get()


def lines(directory: Path) -> list[dict[str, str]]:
    return [json.loads(line) for file in directory.glob("audit-*") for line in file.read_text().splitlines()]


async def test_a_confined_tenant_is_served_in_its_region_alone(redis: RedisProcess, tmp_path: Path) -> None:
    async with two_regions(redis, "alone") as cluster:
        for node in cluster.nodes.values():
            node.prefetches = True
        for number in range(6):
            prompt = [*PROMPT, number]
            given = request(
                f"r{number}", prompt, client=ACME, tenant=ACME.salt(""), cache_hint=CacheHint(prefetch=True)
            )
            assert await cluster.generate(given) == continuation(prompt, 8)
        assert {name for name, node in cluster.nodes.items() if node.works} == {"p0", "d0"}
        await cluster.until(lambda: len(cluster.nodes["p0"].copied) == 6)
        assert not any(node.copied for node in cluster.nodes.values() if node.region == "us")

        before = num_refused("request")
        await cluster.nodes["d0"].leave()
        await cluster.until(lambda: "d0" not in cluster.conductor.nodes)
        said = r"no decode node is available .*tenant acme is confined to eu;"
        options = AuditOptions(path=str(tmp_path))
        with audit.audited(options, "conductor"), pytest.raises(NoNodes, match=said) as refused:
            await cluster.generate(request(client=ACME, tenant=ACME.salt("")))
        answer = as_api_error(refused.value)
        assert (answer.status, answer.error_code) == (503, "no_nodes")
        assert num_refused("request") == before + 1
        # The nodes are in this process, and their answers to copies may come as late as now.
        [line] = [line for line in lines(tmp_path) if line["event"] == "refused"]
        assert line["who"] == "acme"
        assert line["why"] == "tenant acme is confined to eu, and decode nodes are elsewhere only"
        assert await cluster.generate(request("free")) == continuation(PROMPT, 8)


async def test_a_request_goes_on_in_its_region_when_its_node_fails(redis: RedisProcess) -> None:
    async def dies(node: ScriptedNode, work: object, index: int) -> None:
        if index == 3:
            await node.die()

    async with two_regions(redis, "goes-on") as cluster:
        await cluster.add("d3", region="eu")
        cluster.nodes["d0"].script = cluster.nodes["d3"].script = dies
        await cluster.add("d4", region="eu")
        for number in range(4):
            given = request(f"r{number}", client=ACME, tenant=ACME.salt(""))
            assert await cluster.generate(given) == continuation(PROMPT, 8)
        assert not any(node.works for node in cluster.nodes.values() if node.region == "us")


async def test_a_confined_request_does_not_move_elsewhere(redis: RedisProcess) -> None:
    async with two_regions(redis, "stays") as cluster:
        waits, go_on = asyncio.Event(), asyncio.Event()

        async def script(node: ScriptedNode, work: object, index: int) -> None:
            if index == 4:
                waits.set()
                await go_on.wait()

        cluster.nodes["d0"].script = script
        tokens = asyncio.create_task(cluster.generate(request(client=ACME, tenant=ACME.salt(""))))
        try:
            await waits.wait()
            run = cluster.conductor._deps.runs["r"]
            await cluster.until(lambda: run.decodes_on)
            before = num_refused("move")
            with pytest.raises(MigrationFailed, match="tenant acme is confined to eu, and d1 is in us"):
                await cluster.conductor.migrate("r", "d1")
            assert num_refused("move") == before + 1
            with pytest.raises(MigrationFailed, match="no other node has room for it"):
                await cluster.conductor.migrate("r")
            go_on.set()
            assert await tokens == continuation(PROMPT, 8)
        finally:
            tokens.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await tokens


@pytest.mark.parametrize(("region", "said"), [("us", "this conductor is in us"), ("", "has no region")])
async def test_a_conductor_elsewhere_refuses(redis: RedisProcess, region: str, said: str) -> None:
    async with two_regions(redis, f"refuses-{region}", region) as cluster:
        with pytest.raises(OutsideRegions, match=f"acme is confined to eu, and .*{said}") as refused:
            await cluster.generate(request(client=ACME, tenant=ACME.salt("")))
        assert as_api_error(refused.value).status == 503
        assert not any(node.works for node in cluster.nodes.values())
        assert await cluster.generate(request("free")) == continuation(PROMPT, 8)


def test_regions_are_read_from_the_file_of_tenants(tmp_path: Path) -> None:
    file = tmp_path / "tenants.toml"
    file.write_text('[acme]\nkeys = ["sk"]\nregions = ["eu", "uk"]\n[other]\nkeys = ["sk2"]\n')
    keys = ApiKeys.load(str(file))
    found = [keys.get(keys.id_of(key)) for key in ("sk", "sk2")]
    assert [one.client.regions for one in found if one] == [{"eu", "uk"}, set()]
    file.write_text('[acme]\nkeys = ["sk"]\nregions = []\n')
    with pytest.raises(ConfigError, match=r"acme\.regions"):
        ApiKeys.load(str(file))
