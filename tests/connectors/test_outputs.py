"""The texts of fifty prompts, greedy: those of vLLM alone, wherever the prefixes are loaded from."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.connectors.conftest import BLOCK_SIZE, Answer, Redis, VllmServer, hit_everything

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

_NUM_PROMPTS = 50


@dataclass
class Servers:
    plain: VllmServer
    first: VllmServer  # with a disk
    second: VllmServer


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def servers(
    request: pytest.FixtureRequest, vllm_python: Path, redis: Redis, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Servers]:
    dtype = request.param
    folder = tmp_path_factory.mktemp(dtype)

    def extra(name: str, *sets: str) -> dict[str, object]:
        every = ["store.host.capacity_nbytes=256MiB", *sets]
        return {"url": redis.url, "node_id": f"{name}-{dtype}", "set": every}

    plain = VllmServer(vllm_python, folder / "plain.log", None, dtype=dtype)
    disk = f"store.ssd.path={folder / 'ssd'}"
    first = VllmServer(vllm_python, folder / "first.log", extra("first", disk), dtype=dtype)
    second = VllmServer(vllm_python, folder / "second.log", extra("second"), dtype=dtype)
    try:
        for server in (plain, first, second):
            server.start()
        for server in (plain, first, second):
            server.wait_ready()
        yield Servers(plain, first, second)
    finally:
        for server in (plain, first, second):
            server.kill()


def test_fifty_prompts_after_hits_from_each_tier_and_peer(servers: Servers) -> None:
    """In bfloat16 the last bits of a prompt's KV depend on how many of its tokens are computed at once. So
    texts after a hit are those of vLLM alone after a hit in its own cache: it computes as many tokens."""
    rng = random.Random(18)
    prompts = [
        [rng.randrange(10, 500) for _ in range(rng.randrange(BLOCK_SIZE + 1, 14 * BLOCK_SIZE))]
        for _ in range(_NUM_PROMPTS)
    ]
    cold = [servers.plain.complete(prompt) for prompt in prompts]
    warm = [servers.plain.complete(prompt) for prompt in prompts]
    assert texts([servers.first.complete(prompt) for prompt in prompts]) == texts(cold)
    for server in (servers.first, servers.second):  # from its own memory, from the first's
        for prompt, expected in zip(prompts, warm, strict=True):
            hit_everything(server, prompt, expected, always_equal=False)
    servers.first.stop()
    servers.first.start()
    servers.first.wait_ready()
    servers.second.stop()
    for prompt, expected in zip(prompts, warm, strict=True):
        hit_everything(servers.first, prompt, expected, always_equal=False)  # from its disk


def texts(answers: list[Answer]) -> list[list[int]]:
    return [answer.token_ids for answer in answers]
