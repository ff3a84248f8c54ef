"""A cluster under measurement: one on this machine, metrics of its processes, what it says of itself."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

from moonpool.bench.harness.command import Run
from moonpool.bench.harness.services import local_cluster
from moonpool.bench.serve.client.answer import AnswerInvalid, read_json, read_text
from moonpool.bench.serve.client.http_client import HttpClient, ServerUnreachable
from moonpool.bench.serve.client.server import Server
from moonpool.runtime.observing.metrics_server import own_metrics_key
from moonpool.runtime.reports.conditions import CacheState, ModelFacts

CPU_S = re.compile(r"^process_cpu_seconds_total (\S+)", re.MULTILINE)


@asynccontextmanager
async def cluster_server(name: str, sets: Sequence[str], *, ca: str = "") -> AsyncIterator[Server]:
    """The API of a new cluster on this machine, with options as ``key=value``. ``ca``: see ``HttpClient``."""
    async with local_cluster(sets) as url, HttpClient(url, ca=ca) as http:
        yield await Server.find(name, http)


@asynccontextmanager
async def cluster_servers(run: Run, forms: Mapping[str, Sequence[str]]) -> AsyncIterator[dict[str, Server]]:
    """A cluster for each form, by its name, all at the same time. ``forms``: names and options."""
    async with AsyncExitStack() as stack:
        servers: dict[str, Server] = {}
        for name, sets in forms.items():
            run.say(f"starting a cluster: {name}")
            servers[name] = await stack.enter_async_context(cluster_server(name, sets))
        yield servers


class MetricsPages:
    """The pages of metrics of a cluster's conductor and nodes."""

    def __init__(self, server: Server, nodes: Sequence[HttpClient]) -> None:
        self._server, self._nodes = server, nodes

    @classmethod
    async def of(cls, server: Server) -> MetricsPages | None:
        """None if the server is no Moonpool cluster, or its pages cannot be read from here."""
        try:
            status, cluster = read_json(await server.http.get("/v1/cluster"))
            if status != 200:
                return None
            urls = [node["metrics_url"] for node in cluster["nodes"]]
            pages = cls(server, [HttpClient(url, api_key=own_metrics_key()) for url in urls])
            await pages.read()
        except (AnswerInvalid, ServerUnreachable):
            return None
        return pages

    @classmethod
    async def of_local(cls, server: Server) -> MetricsPages:
        """Of a Moonpool cluster on this machine."""
        pages = await cls.of(server)
        assert pages is not None, "its nodes are on this machine"
        return pages

    async def read(self) -> list[str]:
        """All pages now. Raises ``ServerUnreachable``, ``AnswerInvalid``."""
        gets = (self._server.http.get("/metrics"), *(page.get("") for page in self._nodes))
        return [read_text(answer) for answer in await asyncio.gather(*gets)]

    async def total(self, sample: re.Pattern[str]) -> float:
        """The sum of the numbers that ``sample`` finds on all pages. Raises as ``read``."""
        return sum(float(found) for page in await self.read() for found in sample.findall(page))


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
