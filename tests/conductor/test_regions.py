"""Regions of nodes: where they are shown."""

from __future__ import annotations

import orjson
from rich.console import Console

from moonpool.commands.fleet import fleet_view
from moonpool.kvstore.index.redis.node_record import NodeRecord
from tests.conductor.core_nodes import RedisProcess, running


def _shown(found: dict[str, object]) -> str:
    console = Console(width=120)
    with console.capture() as capture:
        console.print(fleet_view(found))
    return capture.get()


async def test_regions_of_nodes_are_listed_where_any_has_one(redis: RedisProcess) -> None:
    async with running(redis.url, "p0", namespace="regions") as cluster:
        assert "region" not in _shown(await cluster.conductor.fleet.listed())
        await cluster.add("p1", region="eu", zone="a")
        listed = await cluster.conductor.fleet.listed()
        assert [(node["region"], node["zone"]) for node in listed["nodes"]] == [("", ""), ("eu", "a")]
        shown = _shown(listed)
        assert "region" in shown and "eu/a" in shown
        nodes = {node["node_id"]: node for node in cluster.conductor.cluster()["nodes"]}
        assert (nodes["p1"]["region"], nodes["p1"]["zone"], nodes["p0"]["region"]) == ("eu", "a", "")


def test_a_record_of_an_older_version_has_no_region() -> None:
    record = NodeRecord("p0", 1, "prefill", region="eu", zone="a")
    assert NodeRecord.from_json(record.to_json()) == record
    older = orjson.loads(record.to_json())
    del older["region"], older["zone"]
    assert NodeRecord.from_json(orjson.dumps(older)).region == ""
