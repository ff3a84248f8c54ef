"""What a server says of itself for a benchmark's record: its models, and what its cache holds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from moonpool.bench.harness.command import Run
from moonpool.bench.serve.client.answer import AnswerInvalid, read_json
from moonpool.bench.serve.client.http_client import ServerUnreachable
from moonpool.bench.serve.client.server import Server
from moonpool.runtime.reports.conditions import CacheState, ModelFacts


async def learn(run: Run, server: Server) -> None:
    """Put what the server holds now into the run's conditions, and its models, if the run does not know them.

    Call it before warming up. Another server than Moonpool's says neither: its record says so.
    """
    assert run.conditions is not None
    conditions = run.conditions
    cluster = await _page(server, "/v1/cluster")
    if cluster is not None:
        blocks = sum(_held(node) for node in cluster["nodes"])
        cache = CacheState.holding(blocks, cluster.get("block_size", 0), conditions.cache.note)
        conditions = replace(conditions, cache=cache)
    if not conditions.models:
        report = await _page(server, "/v1/report") or {}
        told = report.get("environment", {}).get("conditions", {}).get("models", ())
        unknown = ModelFacts(server.dialect.model, *["not said by the server"] * 3)
        conditions = replace(conditions, models=[ModelFacts(**model) for model in told] or [unknown])
    run.conditions = conditions


def _held(node: dict[str, Any]) -> int:
    """Blocks in its pool that are kept for later requests, and those of other tiers."""
    return sum(tier.get("num_cached_blocks", tier["num_used_blocks"]) for tier in node["tiers"])


async def _page(server: Server, path: str) -> dict[str, Any] | None:
    """None: there is no such page, or it needs another key."""
    try:
        status, page = read_json(await server.http.get(path))
    except (AnswerInvalid, ServerUnreachable):
        return None
    return page if status == 200 else None
