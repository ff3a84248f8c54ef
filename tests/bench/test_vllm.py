"""Sessions over two engines: every turn is asked once, after the others' turns, by the router's choice."""

from __future__ import annotations

import pytest

from moonpool.bench.serve.client.http_client import HttpClient
from moonpool.bench.serve.client.server import RequestFailed, Server
from moonpool.bench.serve.client.workload import Workload
from moonpool.bench.vllm.sessions import LeastLoaded, RoundRobin, cache_blocks, converse, figures
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
