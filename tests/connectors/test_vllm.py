"""Real vLLM servers that share their KV cache: the same texts, whatever happens to the cache."""

from __future__ import annotations

import random
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.connectors.conftest import BLOCK_SIZE, Redis, VllmServer, hit_everything
from tests.connectors.small_engine import until
from tests.processes import stop

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

# Around the edges of blocks, and longer than a step's tokens.
_LENGTHS = (BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 100, 333, 700, 1500)


def prompts(seed: int, lengths: tuple[int, ...] = _LENGTHS) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(10, 500) for _ in range(length)] for length in lengths]


class Trio:
    """Two servers with the connector and one without."""

    def __init__(self, plain: VllmServer, first: VllmServer, second: VllmServer, redis: Redis) -> None:
        self.plain, self.first, self.second, self.redis = plain, first, second, redis


@pytest.fixture(scope="module")
def trio(
    vllm_python: Path, plain: VllmServer, redis: Redis, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Trio]:
    folder = tmp_path_factory.mktemp("vllm")

    def extra(name: str) -> dict[str, object]:
        return {"url": redis.url, "node_id": name, "set": ["store.host.capacity_nbytes=256MiB"]}

    first = VllmServer(vllm_python, folder / "first.log", extra("first"), worker=True)
    second = VllmServer(vllm_python, folder / "second.log", extra("second"), worker=True)
    try:
        for server in (first, second):
            server.start()
        for server in (plain, first, second):
            server.wait_ready()
        yield Trio(plain, first, second, redis)
    finally:
        for server in (first, second):
            server.kill()


def test_texts_are_those_of_plain_vllm(trio: Trio) -> None:
    for prompt in prompts(1):
        expected = trio.plain.complete(prompt)
        assert trio.first.complete(prompt).token_ids == expected.token_ids
        hit_everything(trio.first, prompt, expected)  # its own host memory
        hit_everything(trio.second, prompt, expected)  # the other engine's memory


def test_blocks_filled_while_decoding_are_kept(trio: Trio) -> None:
    [prompt] = prompts(2, (60,))
    answer = trio.plain.complete(prompt, 3 * BLOCK_SIZE)
    assert trio.first.complete(prompt, 3 * BLOCK_SIZE).token_ids == answer.token_ids
    longer = prompt + answer.token_ids
    hit_everything(trio.second, longer, trio.plain.complete(longer))


def test_concurrent_requests_and_aborts(trio: Trio) -> None:
    shared, *rest = prompts(3, (640, *range(40, 340, 30)))
    together = [shared + tail for tail in rest]
    expected = [trio.plain.complete(prompt) for prompt in together]
    trio.first.complete(shared)
    with ThreadPoolExecutor(len(together)) as threads:
        for server in (trio.first, trio.second, trio.second):
            server.forget()
            found = list(threads.map(server.complete, together))
            assert [answer.token_ids for answer in found] == [answer.token_ids for answer in expected]


def test_hints_and_quotas_reach_the_store(trio: Trio) -> None:
    prompt, other = prompts(7, (333, 400))
    expected = trio.plain.complete(prompt)
    hinted, hints = trio.first.store_metric, "moonpool_connector_hints_total"
    given = {"pin": {"pin_s": 3600}, "let_go": {"drop_after": True}, "drop": {"drop_from": BLOCK_SIZE}}
    for action, hint in given.items():
        found = trio.first.complete(prompt, kv_transfer_params={"cache_hint": hint})
        assert found.token_ids == expected.token_ids
        until(lambda action=action: hinted(hints, action=action, end="done") == 1)
    trio.first.complete(other, kv_transfer_params={"tenant": "acme", "tenant_cached_nbytes": 1})
    until(lambda: trio.first.store_metric("moonpool_tenant_blocks", tenant="acme") == 1)


def test_redis_stopped(trio: Trio) -> None:
    before, during = prompts(4, (300, 300))
    expected = [trio.plain.complete(prompt) for prompt in (before, during)]
    trio.first.complete(before)
    hit_everything(trio.second, before, expected[0])
    stop(trio.redis.process.pid)
    try:
        for server in (trio.first, trio.second):
            assert server.complete(before).token_ids == expected[0].token_ids
            assert server.complete(during).token_ids == expected[1].token_ids
    finally:
        trio.redis.process.send_signal(signal.SIGCONT)
    hit_everything(trio.second, during, expected[1])


def test_an_engine_that_is_killed_is_a_miss(trio: Trio) -> None:
    """Near the end of this file: it ends the first engine."""
    many = prompts(5, (900,) * 6)
    expected = [trio.plain.complete(prompt) for prompt in many]
    for prompt in many:
        trio.first.complete(prompt)
    hit_everything(trio.second, many[0], expected[0])
    with ThreadPoolExecutor(len(many)) as threads:
        answers = [threads.submit(trio.second.complete, prompt) for prompt in many]
        trio.first.kill()
        found = [answer.result() for answer in answers]
    assert [answer.token_ids for answer in found] == [answer.token_ids for answer in expected]
    hit_everything(trio.second, many[-1], expected[-1])


def test_a_reset_reaches_the_connector(trio: Trio) -> None:
    """Last in this file: the second engine shares no blocks afterwards."""
    first, second = prompts(8, (300, 400))
    for prompt, reset in ((first, trio.second.reset), (second, trio.second.pause_and_resume)):
        expected = trio.plain.complete(prompt)
        trio.second.complete(prompt)
        hit_everything(trio.second, prompt, expected)
        reset()
        found = trio.second.complete(prompt)
        assert (found.token_ids, found.num_cached) == (expected.token_ids, 0)
        hit_everything(trio.second, prompt, expected)  # blocks that it kept after the reset
