"""Sessions over two engines: every turn is asked once, after the others' turns, by the router's choice."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, cast

import pytest

from moonpool.bench.harness.command import Run
from moonpool.bench.serve.client.http_client import HttpClient
from moonpool.bench.serve.client.server import Outcome, RequestFailed, Server
from moonpool.bench.serve.client.workload import Workload
from moonpool.bench.serve.peers.vllm import VllmCpu
from moonpool.bench.vllm import sessions
from moonpool.bench.vllm.engines import Settings
from moonpool.bench.vllm.sessions import (
    LeastLoaded,
    RoundRobin,
    cache_blocks,
    converse,
    figures,
    session_rows,
)
from tests.bench.fake_server import FakeServer

WORK = Workload(requests=4, prompt_tokens=6, output_tokens=2, turns=3, turn_tokens=5)


async def test_turns_of_sessions_go_round(fake: FakeServer) -> None:
    async with FakeServer().running() as other, HttpClient(fake.url) as a, HttpClient(other.url) as b:
        servers = [await Server.find("a", a), await Server.find("b", b)]
        outcome = await converse(RoundRobin(servers), WORK.conversations(), 1)
    assert len(fake.asked) == len(other.asked) == 6
    assert [len(body["prompt"]) for body in fake.asked] == [6, 6, 13, 13, 20, 20]
    assert figures(outcome)["hit ratio"] == 3 * 12 / (4 * (6 + 13 + 20))


async def test_the_engine_with_fewer_requests_is_chosen(fake: FakeServer) -> None:
    async with HttpClient(fake.url) as http:
        router = LeastLoaded([await Server.find(name, http) for name in "ab"])
        first, second = router.choose(), router.choose()
        assert {first.name, second.name} == {"a", "b"}
        router.done(second)
        assert router.choose() is second
        fake.failing = True
        with pytest.raises(ExceptionGroup) as caught:
            await converse(router, WORK.conversations(), 2)
        assert caught.group_contains(RequestFailed, match="too many")


def test_the_cache_holds_a_third_of_all_sessions() -> None:
    work = Workload(requests=64, prompt_tokens=512, output_tokens=32, turns=4, turn_tokens=64)
    assert cache_blocks(work, 128) == -(-64 * (512 + 3 * 64 + 4 * 32) // (3 * 128))


@dataclass
class Engines(Settings):
    """Every engine is the same fake server."""

    url: str = ""

    async def connected(self, run: Run, name: str, sets: Sequence[str] = ()) -> dict[str, Any]:
        return {}

    @asynccontextmanager
    async def server(
        self,
        run: Run,
        name: str,
        store: dict[str, Any] | None,
        arguments: Sequence[str] = (),
        *,
        half: int | None = None,
    ) -> AsyncIterator[VllmCpu]:
        async with HttpClient(self.url) as http:
            yield cast(VllmCpu, Engine(await Server.find(name, http)))


@dataclass
class Engine:
    server: Server

    def turn(self) -> nullcontext[None]:
        return nullcontext()


async def test_a_round_of_each_pair_and_router_does_not_count(
    fake: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two pairs behind two routers make a round of four turns."""
    said, turn = list[str](), count()

    def numbered(outcome: Outcome) -> dict[str, float]:
        """The number of the turn instead of its figures."""
        return dict.fromkeys(figures(outcome), float(next(turn)))

    monkeypatch.setattr(sessions, "figures", numbered)
    engines = Engines("fake", Path(), 2, 16, 1 << 30, seed=1, work=WORK, eager=True, url=fake.url)
    run = Run([], (), rounds=1, quick=False, named=True, say=said.append)
    rows = [row async for row in session_rows(run, engines) if row.metric == "TTFT p50"]
    assert len(said) == 8
    assert sorted(row.value for row in rows) == [4e3, 5e3, 6e3, 7e3]
