"""Real vLLM engines behind a conductor: they register themselves, and requests go where their prefix is."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moonpool.conductor.core import Conductor
from moonpool.conductor.fleet.served_model import ServedModel
from moonpool.conductor.observing.timelines.timeline import RequestSummary
from moonpool.conductor.request import GenerateRequest, SamplingParams, TokenEvent
from moonpool.runtime.config.options import ConductorOptions, IndexOptions
from moonpool.runtime.config.security_options import SecurityOptions
from moonpool.runtime.security import process
from moonpool.runtime.security.local_key import local_key
from moonpool.runtime.security.roles import CONDUCTOR, Caller
from tests.connectors.conftest import BLOCK_SIZE, MODEL, Redis, VllmServer
from tests.connectors.test_vllm import prompts

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

_MAX_MODEL_LEN = 2048
# Engines on a busy machine publish late; that they have ended is known from their connections.
LEASE_S = 120

SETS = ["store.host.capacity_nbytes=256MiB", f"index.lease_ttl_s={LEASE_S}"]


class Pair:
    """Two engines that register themselves, and one alone."""

    def __init__(self, plain: VllmServer, engines: dict[str, VllmServer], redis: Redis) -> None:
        self.plain, self.engines, self.redis = plain, engines, redis


@pytest.fixture(scope="module")
def pair(
    vllm_python: Path, plain: VllmServer, redis: Redis, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("routing")
    engines = {}
    for name in ("first", "second"):
        extra = {"url": redis.url, "node_id": name, "set": SETS}
        engines[name] = VllmServer(vllm_python, folder / f"{name}.log", extra, registers=True)
    try:
        for server in engines.values():
            server.start()
        for server in (plain, *engines.values()):
            server.wait_ready()
        yield Pair(plain, engines, redis)
    finally:
        for server in engines.values():
            server.kill()


@asynccontextmanager
async def conducting(pair: Pair, policy: str = "goodput") -> AsyncIterator[Conductor]:
    """A conductor that sees both engines."""
    process.use(process.Security(SecurityOptions(cluster_key=local_key()), Caller(CONDUCTOR, "test")))
    model = ServedModel.from_checkpoint(MODEL, block_size=BLOCK_SIZE, max_model_len=_MAX_MODEL_LEN)
    index = IndexOptions(redis_url=pair.redis.url, lease_ttl_s=LEASE_S)
    conductor = Conductor(model, ConductorOptions(policy=policy), index)
    await conductor.start()
    try:
        async with asyncio.timeout(60):
            while {n["state"] for n in conductor.cluster()["nodes"]} != {"ready"}:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        yield conductor
    finally:
        await conductor.close()


async def answer(conductor: Conductor, name: str, prompt: list[int], count: int = 24) -> list[TokenEvent]:
    sampling = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
    request = GenerateRequest(name, np.array(prompt, np.int32), sampling)
    return [event async for event in conductor.generate(request)]


def ids(events: list[TokenEvent]) -> list[int]:
    return [event.token_id for event in events]


def engine_of(conductor: Conductor, name: str) -> str:
    return decided(conductor, name)[0].decode_node


def decided(conductor: Conductor, name: str) -> tuple[RequestSummary, dict[str, Any]]:
    """The outcome of a request, and the decision on its placement with the estimates it rests on."""
    timeline = conductor.timeline(name)
    assert timeline is not None
    placed = [event for event in timeline.to_dict()["events"] if event["event"] == "placed"]
    return timeline.summary, placed[-1]["placement"]


async def test_requests_follow_their_prefix(pair: Pair) -> None:
    async with conducting(pair, "local-cache") as conductor:
        registry = conductor._deps.registry
        for turn, prompt in enumerate(prompts(11, (400, 700, 900))):
            expected = pair.plain.complete(prompt).token_ids
            assert ids(await answer(conductor, f"cold-{turn}", prompt)) == expected
            chosen = engine_of(conductor, f"cold-{turn}")
            chain = registry.chain("")
            assert chain is not None
            keys, _ = chain.extend(np.array(prompt, np.int32), BLOCK_SIZE, None)
            # The keys computed here are those that the engine published: every full block of the prompt.
            async with asyncio.timeout(20):
                while registry.holders(keys).get(chosen) != len(keys):  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
            events = await answer(conductor, f"warm-{turn}", prompt)
            assert ids(events) == expected
            summary, decision = decided(conductor, f"warm-{turn}")
            # Both are idle and count as equally fast until they have measured more, so the prefix decides.
            assert (summary.decode_node, summary.reason) == (chosen, "locality"), decision
            assert events[-1].num_cached_tokens == (len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE


async def test_an_engine_that_is_killed_costs_no_token(pair: Pair) -> None:
    """Last in this file: it ends an engine, in less time than 1,000 tokens take."""
    async with conducting(pair) as conductor:
        [prompt] = prompts(12, (300,))
        expected = pair.plain.complete(prompt, 1000).token_ids
        sampling = SamplingParams(max_tokens=1000, temperature=0.0, ignore_eos=True)
        found = []
        async for event in conductor.generate(GenerateRequest("r", np.array(prompt, np.int32), sampling)):
            found.append(event.token_id)
            if len(found) == 5:
                pair.engines[engine_of(conductor, "r")].kill()
        assert found == expected
        timeline = conductor.timeline("r")
        assert timeline is not None
        assert timeline.summary.attempts >= 2
