"""``moonpool fleet canary``: what it shows, and what it asks for."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from rich.console import Console

from moonpool.client import Client
from moonpool.commands.canary import canary_view
from moonpool.conductor.canary.decision import Tally, decide
from moonpool.conductor.canary.record import Canary, FormerShare


def text_of(*found: dict[str, Any]) -> str:
    console = Console(width=160)
    with console.capture() as capture:
        console.print(canary_view(found))
    return capture.get()


def test_the_view_has_both_sides_and_what_the_counts_say() -> None:
    sides = {"stable": Tally(900, 9, 800, 890, 890, 89.1, 8.9), "candidate": Tally(6, 6)}
    canary = Canary("id", "large", "large", "next", 10.0, ("acme",), auto=True, slo_ttft_s=1.0, sides=sides)
    decision = decide(sides["stable"], sides["candidate"], canary.slo)
    found = json.loads(json.dumps(canary.to_dict()))
    running = text_of(found | {"verdict": decision.verdict.value, "reasons": decision.reasons})
    assert "large: next with 10 % of acme beside large: running, automatic" in running
    rows = {line.split()[0]: line.split()[1:] for line in running.splitlines() if line.strip()}
    assert rows["large"] == ["900", "9", "89.8%", "100.0", "ms", "100.0%", "10.0", "ms"]
    assert rows["next"] == ["6", "6", *"––––"]
    assert "answered without an error: 0.0% of 6, before 99.0% of 900" in running
    assert "the counts say: roll back" in running
    ended = text_of(found | {"state": "rolled back", "reason": "it failed"})
    assert "it failed" in ended and "the counts say" not in ended
    former = json.loads(json.dumps(replace(canary, former=(FormerShare(1.0, sides),)).to_dict()))["former"]
    assert "with 1 % before: large 9 errors of 900, next 6 errors of 6" in text_of(
        found | {"former": former, "verdict": "wait"}
    )


@pytest.fixture
async def asked() -> AsyncIterator[tuple[Client, list[str]]]:
    """A client of a server that notes what it is asked for."""
    seen: list[str] = []

    async def answer(http: web.Request) -> web.Response:
        seen.append(f"{http.method} {http.raw_path}")
        return web.json_response({"data": []})

    app = web.Application()
    app.router.add_route("*", "/{rest:.*}", answer)
    async with TestServer(app) as server, Client(str(server.make_url("/"))) as client:
        yield client, seen


async def test_the_client_names_what_it_changes_in_the_path(asked: tuple[Client, list[str]]) -> None:
    client, seen = asked
    await client.start_canary("large", "next", 12.5, tenants=["a b", "c"], least=7, auto=True)
    await client.start_canary("large", "next", 10)
    await client.share_canary("large", 25)
    await client.promote_canary("large")
    await client.roll_back_canary("large")
    assert await client.canaries() == []
    path = "/v1/fleet/canary/large"
    assert seen == [
        f"POST {path}/start/next/12.5?tenant=a%20b&tenant=c&auto=1&least=7",
        f"POST {path}/start/next/10",
        f"POST {path}/share/25",
        f"POST {path}/promote",
        f"POST {path}/rollback",
        "GET /v1/fleet/canary",
    ]
