"""``bench serve --case agents``: what each form asks for, and the case on real clusters."""

from __future__ import annotations

import asyncio
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from moonpool.bench.cli import bench
from moonpool.bench.serve.agents import HINTED, PLAIN, WARMED, Talk
from moonpool.bench.serve.client.http_client import HttpClient
from moonpool.bench.serve.client.server import RequestFailed, Server
from moonpool.bench.serve.client.workload import Prompts
from moonpool.runtime.reports import report
from tests.bench.fake_server import FakeServer

KEPT = {"pin_s": 60.0, "prefetch": True}


async def asked(fake: FakeServer, form: str) -> list[dict[str, Any]]:
    """What one agent of three turns asks for, without the prompts of others."""
    async with HttpClient(fake.url) as http:
        talk = Talk(await Server.find("fake", http), form, Prompts(1, form))
        ttfts = await talk.run([[0.01, 0.01]], 0.001)
    assert len(ttfts) == len(talk.rounds[0]) == 2, "the first turn waits for no tool"
    assert any("prompt" in body for body in fake.asked), "others have prompts, too"
    return [body for body in fake.asked if "messages" in body]


@pytest.mark.parametrize(
    ("form", "hints"), [(PLAIN, [None] * 3), (HINTED, [KEPT, KEPT, {"drop_after": True}])]
)
async def test_a_turn_brings_the_conversation_so_far_and_its_hint(
    fake: FakeServer, form: str, hints: list[Any]
) -> None:
    turns = await asked(fake, form)
    assert [body.get("cache_hint") for body in turns] == hints
    assert [len(body["messages"]) for body in turns] == [1, 3, 5]
    for before, after in pairwise(turns):
        assert after["messages"][: len(before["messages"])] == before["messages"]
        assert after["messages"][-2]["content"].startswith(" t0 t1"), "the answer"


async def test_the_conversation_is_prefetched_while_the_tool_runs(fake: FakeServer) -> None:
    requests = await asked(fake, WARMED)
    warmed = [body["messages"] for body in requests if "max_tokens" not in body]
    turns = [body["messages"] for body in requests if "max_tokens" in body]
    assert warmed == [messages[:-1] for messages in turns[1:]]


async def test_a_refused_turn_ends_the_run(fake: FakeServer) -> None:
    fake.failing = True
    with pytest.raises(ExceptionGroup) as caught:
        await asked(fake, WARMED)
    assert caught.group_contains(RequestFailed, match="too many")


def test_times_that_no_tool_has_are_refused() -> None:
    result = CliRunner().invoke(bench, ["serve", "--case", "agents", "--tool-seconds", "3", "2"])
    assert "the shorter one first" in str(result.exception)


@pytest.mark.slow
async def test_the_case_runs_on_clusters(tmp_path: Path) -> None:
    file = tmp_path / "agents.json"
    arguments = ["serve", "--case", "agents", "--quick", "--json", str(file)]
    result = await asyncio.to_thread(CliRunner().invoke, bench, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    content = json.loads(file.read_text())
    report.validate(content)
    rows = {(row["case"].rpartition("s, ")[2], row["metric"]): row for row in content["rows"]}
    for form in (PLAIN, HINTED, WARMED):
        assert rows["default memory", f"TTFT after a tool call, {form}"]["value"] > 0
        # The turn before has left the beginning of the prompt in the cache.
        assert rows["default memory", f"cache hit after a tool call, {form}"]["value"] > 50
    assert len(rows) == 12
    assert content["environment"]["conditions"]["models"]
