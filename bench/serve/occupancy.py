"""How busy a cluster is meanwhile: its cores, its batches, its queues."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from statistics import fmean

from moonpool.bench.serve.client.answer import AnswerInvalid, read_json, read_text
from moonpool.bench.serve.client.http_client import HttpClient, ServerUnreachable
from moonpool.bench.serve.client.server import Server
from moonpool.runtime.machine.processor import usable_cores
from moonpool.runtime.observing.metrics_server import own_metrics_key

# A reading costs each process a few milliseconds.
_PERIOD_S = 0.25
_CPU = re.compile(r"^process_cpu_seconds_total (\S+)", re.MULTILINE)
_SEQUENCES = re.compile(r'^moonpool_engine_requests\{state="(\w+)"\} (\S+)', re.MULTILINE)


@dataclass
class Occupancy:
    """cpu_s: of the cluster's processes, in ``seconds``. running, waiting: a reading each, of all engines."""

    cpu_s: float = 0.0
    client_cpu_s: float = 0.0
    seconds: float = 0.0
    running: list[float] = field(default_factory=list)
    waiting: list[float] = field(default_factory=list)

    @property
    def cores(self) -> float:
        """The share of this machine's cores that the cluster's processes used."""
        return self.cpu_s / (self.seconds * usable_cores())

    @property
    def client_cores(self) -> float:
        """The share that the load itself used."""
        return self.client_cpu_s / (self.seconds * usable_cores())

    @property
    def batch_size(self) -> float:
        """Mean sequences that are computed at a time, over the readings that found any."""
        return fmean([count for count in self.running if count] or [0.0])

    @property
    def queue_length(self) -> float:
        """Mean sequences that wait for a place in a step."""
        return fmean(self.waiting or [0.0])


class Watch:
    """Reads the metrics of every process of a cluster."""

    def __init__(self, server: Server, pages: Sequence[HttpClient]) -> None:
        self._server, self._pages = server, pages

    @classmethod
    async def of(cls, server: Server) -> Watch | None:
        """None if the server is no Moonpool cluster, or its nodes cannot be reached from here."""
        try:
            status, cluster = read_json(await server.http.get("/v1/cluster"))
            if status != 200:
                return None
            urls = [node["metrics_url"] for node in cluster["nodes"]]
            watch = cls(server, [HttpClient(url, api_key=own_metrics_key()) for url in urls])
            await watch._read()
        except (AnswerInvalid, ServerUnreachable):
            return None
        return watch

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Occupancy]:
        """What is yielded is complete after the block. Raises ``ServerUnreachable``."""
        found = Occupancy()
        began_s, client_s = time.perf_counter(), time.process_time()
        before_s, _ = await self._read()
        reading = asyncio.create_task(self._keep_reading(found))
        try:
            yield found
        finally:
            reading.cancel()
            with suppress(asyncio.CancelledError):
                await reading
        after_s, _ = await self._read()
        found.cpu_s = after_s - before_s
        found.seconds = time.perf_counter() - began_s
        found.client_cpu_s = time.process_time() - client_s

    async def _keep_reading(self, found: Occupancy) -> None:
        while True:
            await asyncio.sleep(_PERIOD_S)
            _, counts = await self._read()
            found.running.append(counts["running"])
            found.waiting.append(counts["waiting"])

    async def _read(self) -> tuple[float, dict[str, float]]:
        """CPU seconds of all processes, and sequences of all engines by state."""
        gets = (self._server.http.get("/metrics"), *(page.get("") for page in self._pages))
        cpu_s, counts = 0.0, {"running": 0.0, "waiting": 0.0}
        for text in map(read_text, await asyncio.gather(*gets)):
            cpu_s += sum(map(float, _CPU.findall(text)))
            for state, count in _SEQUENCES.findall(text):
                counts[state] = counts.get(state, 0.0) + float(count)
        return cpu_s, counts
