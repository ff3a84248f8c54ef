"""What it takes two conductors to place a request: they book with each other."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence

from moonpool.bench.conductor.decisions import Settings
from moonpool.bench.conductor.overhead import conductors
from moonpool.bench.harness.command import Run
from moonpool.bench.harness.turns import spread
from moonpool.bench.serve.client.answer import read_json, status_of
from moonpool.bench.serve.client.http_client import HttpClient
from moonpool.bench.serve.client.server import COMPLETIONS, RequestFailed, new_request_id
from moonpool.runtime.reports.report import Row

_CASE = "two conductors, 2 + 2 nodes, one request at a time"
_MEET_S = 30.0
_WARM_UP = 8  # requests of each, past the slow start of nodes
_PROMPT_TOKENS = 128


async def booking_rows(run: Run, settings: Settings) -> AsyncIterator[Row]:
    """Seconds from a request's start in the core until it is placed and booked, of both and of each."""
    found: dict[str, list[float]] = {"the one that decides": [], "the other": []}
    async with (
        conductors(2, 0.0, prefill=2, decode=2) as running,
        HttpClient(running[0][0]) as one,
        HttpClient(running[1][0]) as two,
    ):
        clients = await _by_id([one, two])
        for number in range(-_WARM_UP, max(settings.requests // 4, 16)):
            for seconds, client in zip(found.values(), clients, strict=True):
                placed_s = await _placed_s(client, number)
                if number >= 0:
                    seconds.append(placed_s)
    both = [value for pair in zip(*found.values(), strict=True) for value in pair]
    yield spread(_CASE, "placement and booking", both, "ms", 1e3)
    for name, seconds in found.items():
        yield spread(_CASE, f"placement and booking, {name}", seconds, "ms", 1e3)


async def _by_id(clients: Sequence[HttpClient]) -> list[HttpClient]:
    """In the order of the conductors' ids: the first one decides. Waits until they know each other."""
    ids: list[str] = []
    async with asyncio.timeout(_MEET_S):
        for client in clients:
            while True:
                _, cluster = read_json(await client.get("/v1/cluster"))
                if cluster["num_other_conductors"] == len(clients) - 1:
                    break
                await asyncio.sleep(0.05)
            ids.append(cluster["conductor_id"])
    return [client for _, client in sorted(zip(ids, clients, strict=True), key=lambda pair: pair[0])]


async def _placed_s(client: HttpClient, number: int) -> float:
    prompt = [3 + (number + i) % 2000 for i in range(_PROMPT_TOKENS)]
    request_id = new_request_id()
    body = json.dumps({"prompt": prompt, "max_tokens": 2}).encode()
    answer = await client.post(COMPLETIONS, body, {"x-request-id": request_id})
    if (status := status_of(answer)) != 200:
        raise RequestFailed(f"the conductor answered {status}")
    _, timeline = read_json(await client.get(f"/v1/requests/{request_id}/timeline"))
    return next(float(event["at_s"]) for event in timeline["events"] if event["event"] == "placed")
