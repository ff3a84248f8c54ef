"""Real vLLM engines behind a conductor, one for prompts and one for decoding: tokens and faults."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from moonpool.conductor.core import Conductor
from moonpool.conductor.request import GenerateRequest, SamplingParams
from moonpool.runtime.errors import MoonpoolError
from tests.connectors.conftest import Redis, VllmServer
from tests.connectors.test_routing import SETS, Pair, answer, conducting, ids
from tests.connectors.test_vllm import prompts

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

COUNT = 24


@pytest.fixture(scope="module")
def pair(
    vllm_python: Path, plain: VllmServer, redis: Redis, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    """Engines ``prefill`` and ``decode``, and one without the connector."""
    folder = tmp_path_factory.mktemp("pairs")
    engines = {}
    for role in ("prefill", "decode"):
        sets = [*SETS, "transfer.deadline_s=5"]
        extra = {"url": redis.url, "node_id": role, "role": role, "set": sets}
        engines[role] = VllmServer(vllm_python, folder / f"{role}.log", extra, registers=True)
    try:
        for server in engines.values():
            server.start()
        for server in (plain, *engines.values()):
            server.wait_ready()
        yield Pair(plain, engines, redis)
    finally:
        for server in engines.values():
            server.kill()


def moved(conductor: Conductor, name: str) -> list[str]:
    """The nodes of a request's last attempt, and what it was told of."""
    timeline = conductor.timeline(name)
    assert timeline is not None
    return [timeline.summary.prefill_node, timeline.summary.decode_node]


async def test_tokens_are_those_of_one_engine(pair: Pair) -> None:
    """Prompts that end within a block, at its end and after its first token; greedy and seeded."""
    async with conducting(pair, "least-loaded") as conductor:
        for number, prompt in enumerate(prompts(21, (20, 320, 321, 333, 900))):
            name, expected = f"greedy-{number}", pair.plain.complete(prompt, COUNT).token_ids
            assert ids(await answer(conductor, name, prompt, COUNT)) == expected
            assert moved(conductor, name) == ["prefill", "decode"]
        for number, prompt in enumerate(prompts(22, (50, 200))):
            sampled = pair.plain.complete(prompt, COUNT, temperature=0.9, top_p=0.9, seed=7)
            sampling = SamplingParams(max_tokens=COUNT, temperature=0.9, top_p=0.9, seed=7, ignore_eos=True)
            request = GenerateRequest(f"seeded-{number}", np.array(prompt, np.int32), sampling)
            events = [event async for event in conductor.generate(request)]
            assert ids(events) == sampled.token_ids


async def test_requests_at_the_same_time(pair: Pair) -> None:
    async with conducting(pair, "least-loaded") as conductor:
        asked = prompts(23, (100, 250, 333, 400, 500, 64))
        asked += asked[:2]  # two have the same partial block
        expected = [pair.plain.complete(prompt, COUNT).token_ids for prompt in asked]
        answers = await asyncio.gather(
            *(answer(conductor, f"many-{number}", prompt, COUNT) for number, prompt in enumerate(asked))
        )
        assert [ids(events) for events in answers] == expected


async def test_an_abort_leaves_nothing(pair: Pair) -> None:
    async with conducting(pair, "least-loaded") as conductor:
        for number, prompt in enumerate(prompts(24, (1500, 1500, 1500))):
            asking = asyncio.create_task(answer(conductor, f"abort-{number}", prompt, 200))
            await asyncio.wait((asking,), timeout=0.4 * number)
            asking.cancel()
            await asyncio.wait((asking,))
        async with asyncio.timeout(60):
            for server in pair.engines.values():
                while server.metric("vllm:num_requests_running") or server.metric("vllm:kv_cache_usage_perc"):  # noqa: ASYNC110
                    await asyncio.sleep(0.1)


async def test_a_stopped_prefill_engine_costs_no_token(pair: Pair) -> None:
    """It stops after it has answered: the decode engine computes the prompt itself."""
    async with conducting(pair, "least-loaded") as conductor:
        [prompt] = prompts(25, (333,))
        expected = pair.plain.complete(prompt, COUNT).token_ids
        assert ids(await answer(conductor, "before", prompt, COUNT)) == expected
        stopped = pair.engines["prefill"].processes()
        for process in stopped:
            process.send_signal(signal.SIGSTOP)
        try:
            # Its answer, given again: nothing can be read behind it.
            given = {"do_remote_prefill": True, "remote_engine_id": "prefill"}
            [other] = prompts(26, (333,))
            found = await asyncio.to_thread(
                pair.engines["decode"].complete, other, COUNT, kv_transfer_params=given
            )
            assert found.token_ids == pair.plain.complete(other, COUNT).token_ids
        finally:
            for process in stopped:
                process.send_signal(signal.SIGCONT)


async def test_a_killed_decode_engine_costs_no_token(pair: Pair) -> None:
    """Last in this file: it ends an engine, and another one starts in its place."""
    [prompt] = prompts(27, (333,))
    expected = pair.plain.complete(prompt, 1000).token_ids
    sampling = SamplingParams(max_tokens=1000, temperature=0.0, ignore_eos=True)

    async def killed_midway() -> bool:
        """False: the engine's tokens came late and together, all of them before it was killed."""
        found, said = list[int](), ""
        async with conducting(pair, "least-loaded") as conductor:
            request = GenerateRequest("r", np.array(prompt, np.int32), sampling)
            try:
                async for event in conductor.generate(request):
                    found.append(event.token_id)
                    if len(found) == 5:
                        pair.engines["decode"].kill()
            except MoonpoolError as error:
                said = str(error)
        assert found == expected[: len(found)] and len(found) >= 5
        assert "decode" in said if said else found == expected, said  # there is no other one
        return bool(said)

    for _ in range(3):
        if await killed_midway():
            return
        pair.engines["decode"].start()
        pair.engines["decode"].wait_ready()
    pytest.fail("no stream was cut by the end of its engine")
