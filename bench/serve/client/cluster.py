"""A Moonpool cluster under measurement: one on this machine, and the metrics of a cluster's processes."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from moonpool.bench.harness.services import local_cluster
from moonpool.bench.serve.client.answer import AnswerInvalid, read_json, read_text
from moonpool.bench.serve.client.http_client import HttpClient, ServerUnreachable
from moonpool.bench.serve.client.server import Server
from moonpool.runtime.observing.metrics_server import own_metrics_key

CPU_S = re.compile(r"^process_cpu_seconds_total (\S+)", re.MULTILINE)


@asynccontextmanager
async def cluster_server(name: str, sets: Sequence[str], *, ca: str = "") -> AsyncIterator[Server]:
    """The API of a new cluster on this machine, with options as ``key=value``. ``ca``: see ``HttpClient``."""
    async with local_cluster(sets) as url, HttpClient(url, ca=ca) as http:
        yield await Server.find(name, http)


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

    async def read(self) -> list[str]:
        """All pages now. Raises ``ServerUnreachable``, ``AnswerInvalid``."""
        gets = (self._server.http.get("/metrics"), *(page.get("") for page in self._nodes))
        return [read_text(answer) for answer in await asyncio.gather(*gets)]

    async def total(self, sample: re.Pattern[str]) -> float:
        """The sum of the numbers that ``sample`` finds on all pages. Raises as ``read``."""
        return sum(float(found) for page in await self.read() for found in sample.findall(page))
