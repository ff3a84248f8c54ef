"""The texts of fifty prompts, greedy: those of vLLM alone, wherever the prefixes are loaded from."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.connectors.conftest import BLOCK_SIZE, Answer, Redis, VllmServer, hit_everything

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

_NUM_PROMPTS = 50
_NUM_TOKENS = 8  # wrong KV shows in the first ones


@dataclass
class Servers:
    plain: VllmServer
    first: VllmServer  # with a disk
    second: VllmServer


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def servers(
    request: pytest.FixtureRequest,
    vllm_python: Path,
    plain: VllmServer,
    redis: Redis,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Servers]:
    dtype = request.param
    folder = tmp_path_factory.mktemp(dtype)

    def extra(name: str, *sets: str) -> dict[str, object]:
        every = ["store.host.capacity_nbytes=256MiB", *sets]
        return {"url": redis.url, "node_id": f"{name}-{dtype}", "set": every}

    disk = f"store.ssd.path={folder / 'ssd'}"
    first = VllmServer(vllm_python, folder / "first.log", extra("first", disk), dtype=dtype)
    second = VllmServer(vllm_python, folder / "second.log", extra("second"), dtype=dtype)
    started = [first, second]
    if dtype != "float32":
        plain = VllmServer(vllm_python, folder / "plain.log", None, dtype=dtype)
        started.append(plain)
    try:
        for server in started:
            server.start()
        for server in (plain, first, second):
            server.wait_ready()
        yield Servers(plain, first, second)
    finally:
        for server in started:
            server.kill()


def test_fifty_prompts_after_hits_from_each_tier_and_peer(servers: Servers) -> None:
    """In bfloat16 the last bits of a prompt's KV depend on how many of its tokens are computed at once. So
    texts after a hit are those of vLLM alone after a hit in its own cache: it computes as many tokens."""
    rng = random.Random(18)
    prompts = [
        [rng.randrange(10, 500) for _ in range(rng.randrange(BLOCK_SIZE + 1, 14 * BLOCK_SIZE))]
        for _ in range(_NUM_PROMPTS)
    ]

    def complete_all(server: VllmServer) -> list[Answer]:
        return [server.complete(prompt, _NUM_TOKENS) for prompt in prompts]

    def hit_all(server: VllmServer) -> None:
        for prompt, expected in zip(prompts, warm, strict=True):
            hit_everything(server, prompt, expected, always_equal=False, max_tokens=_NUM_TOKENS)

    with ThreadPoolExecutor() as threads:  # each server has a core
        computed = threads.submit(complete_all, servers.first)
        cold, warm = complete_all(servers.plain), complete_all(servers.plain)
        assert texts(computed.result()) == texts(cold)
        # From its own memory, and from the first's.
        for hit in [threads.submit(hit_all, server) for server in (servers.first, servers.second)]:
            hit.result()
    servers.first.stop()
    servers.second.stop()
    servers.first.start()
    servers.first.wait_ready()
    hit_all(servers.first)  # from its disk


def texts(answers: list[Answer]) -> list[list[int]]:
    return [answer.token_ids for answer in answers]
