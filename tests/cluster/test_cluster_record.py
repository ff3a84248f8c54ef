"""What a real cluster says of itself is what a benchmark of it records."""

from __future__ import annotations

from typing import Any

import aiohttp
import pytest

from moonpool.bench.harness.shapes import models_of
from moonpool.local.cluster import LocalCluster
from moonpool.runtime.machine.description import describe_machine
from moonpool.runtime.reports.schema import validate
from tests.cluster.conftest import eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_the_report_names_models_machines_and_what_is_cached(cluster: LocalCluster) -> None:
    prompt = list(range(300, 364))
    body = {"model": "moonpool-demo", "prompt": prompt, "max_tokens": 4, "ignore_eos": True}
    async with aiohttp.ClientSession() as http:
        async with http.post(f"{cluster.url}/v1/completions", json=body) as answer:
            assert answer.status == 200, await answer.text()

        async def cached() -> bool:
            async with http.get(f"{cluster.url}/v1/report") as answer:
                assert answer.status == 200
                found.update(await answer.json())
            return bool(found["environment"]["conditions"]["cache"]["tokens"] >= len(prompt))

        found: dict[str, Any] = {}
        await eventually(cached)
    validate(found, complete=True)
    environment, conditions = found["environment"], found["environment"]["conditions"]
    (ours,) = models_of(())
    told = {name: conditions["models"][0][name] for name in ("revision", "weights", "kv")}
    assert told == {"revision": ours.revision, "weights": ours.weights, "kv": ours.kv}
    assert len(conditions["models"]) == 1
    assert {node["machine"] for node in environment["nodes"]} == {describe_machine()}
    assert environment["command"].startswith("python -m moonpool.conductor ")
    assert "conductor.policy" in environment["options"]
    latencies = {row["metric"]: row for row in found["rows"] if row["metric"] in ("TTFT", "TPOT", "E2E")}
    assert set(latencies) == {"TTFT", "TPOT", "E2E"}
    for row in latencies.values():
        assert row["p50"] <= row["p90"] <= row["p95"] <= row["p99"]
