"""How long the model itself computed, read from the nodes' metrics before and after a request."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from dataclasses import dataclass

from moonpool.bench.serve.client.answer import AnswerInvalid, read_json, read_text
from moonpool.bench.serve.client.http_client import HttpClient, ServerUnreachable
from moonpool.bench.serve.client.server import Server

_SUM = re.compile(r'^moonpool_model_seconds_sum\{kind="(\w+)"[^}]*\} (\S+)', re.MULTILINE)


@dataclass(frozen=True, slots=True)
class ModelTime:
    """Seconds inside the model, over all nodes, since they started."""

    prefill_s: float
    decode_s: float

    def since(self, earlier: ModelTime) -> ModelTime:
        return ModelTime(self.prefill_s - earlier.prefill_s, self.decode_s - earlier.decode_s)


class ModelClock:
    """Reads ``moonpool_model_seconds`` of every node of a cluster."""

    def __init__(self, metrics_urls: Sequence[str]) -> None:
        self._pages = [HttpClient(url) for url in metrics_urls]

    @classmethod
    async def of(cls, server: Server) -> ModelClock | None:
        """None where the server is no Moonpool cluster, or its nodes cannot be reached from here."""
        try:
            status, cluster = read_json(await server.http.get("/v1/cluster"))
            if status != 200:
                return None
            clock = cls([node["metrics_url"] for node in cluster["nodes"]])
            await clock.read()
        except (AnswerInvalid, ServerUnreachable):
            return None
        return clock

    async def read(self) -> ModelTime:
        """Ask all nodes.

        Raises:
            ServerUnreachable: one did not answer.
        """
        answers = await asyncio.gather(*(page.get("") for page in self._pages))
        seconds = {"prefill": 0.0, "decode": 0.0}
        for answer in answers:
            for kind, value in _SUM.findall(read_text(answer)):
                seconds[kind] += float(value)
        return ModelTime(seconds["prefill"], seconds["decode"])
