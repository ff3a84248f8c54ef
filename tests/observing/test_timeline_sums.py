"""The parts of a request's timeline are its time, at the server and nearly so as its client sees it."""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections import Counter
from collections.abc import Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from moonpool.client import Client, Reply
from moonpool.errors import ApiError
from moonpool.local.cluster import LocalCluster
from moonpool.runtime.config.engine_options import SpeculativeOptions
from moonpool.runtime.config.options import ClusterOptions
from tests.cluster.conftest import eventually, kill, nodes, small_config

WORDS = re.findall(r"\w+", "And it came to pass in those days that the word came unto him")
NUM_REQUESTS, AT_ONCE = 400, 12


@dataclass
class Seen:
    """What clients measured, in seconds, and what the timelines say."""

    client_s: list[float] = field(default_factory=list)
    parts_s: list[float] = field(default_factory=list)
    healthz_s: list[float] = field(default_factory=list)  # of requests that take no time themselves
    names: Counter[str] = field(default_factory=Counter)  # requests with such a part
    most_attempts: int = 0

    def add(self, client_s: float, told: dict[str, Any]) -> None:
        parts = told["parts"]
        self.client_s.append(client_s)
        self.parts_s.append(sum(part["seconds"] for part in parts))
        self.names.update({part["name"] for part in parts})
        self.most_attempts = max(self.most_attempts, told["summary"]["attempts"])
        # With "api" they are the whole, unless something is counted twice.
        assert self.parts_s[-1] == pytest.approx(told["api"]["e2e_s"], rel=0.02), told
        assert told["explanation"], told


async def asked(client: Client, number: int, seen: Seen, moves: bool) -> None:
    rng = random.Random(number)
    words = WORDS * rng.choice((1, 1, 4, 40))
    prompt = " ".join(words) if number % 3 else f"{number} " + " ".join(rng.choices(words, k=len(words)))
    reply, sampling = Reply(), rng.choice(({"temperature": 0}, {"temperature": 0.8, "seed": number}))
    began_s, num_tokens = time.monotonic(), rng.choice((1, 8, 60))
    moving: list[asyncio.Task[Any]] = []
    stream = client.complete(prompt, reply, max_tokens=num_tokens, ignore_eos=True, **sampling)
    async with aclosing(stream) as pieces:
        async for _ in pieces:
            if number % 50 == 49:
                break  # the client leaves
            if moves and number % 20 == 1 and len(reply.pieces_s) == 4:
                moving.append(asyncio.create_task(client.migrate(reply.id)))
    client_s = time.monotonic() - began_s
    for move in moving:
        with suppress(ApiError):  # it had ended, or there was no other node
            await move
    if number % 50 != 49:
        seen.add(client_s, await client.timeline(reply.id))


async def load(client: Client, seen: Seen, halfway: Callable[[], None], moves: bool) -> None:
    waiting = iter(range(NUM_REQUESTS))

    async def one_after_the_other() -> None:
        for number in waiting:
            if number == NUM_REQUESTS // 2:
                halfway()
            await asked(client, number, seen, moves)

    async def nothing() -> None:
        while True:
            began_s = time.monotonic()
            await client._read("/healthz", "GET")
            seen.healthz_s.append(time.monotonic() - began_s)
            await asyncio.sleep(0.05)

    beside = asyncio.create_task(nothing())
    async with asyncio.TaskGroup() as group:
        for _ in range(AT_ONCE):
            group.create_task(one_after_the_other())
    beside.cancel()


async def all_ready(client: Client) -> bool:
    return all(node["state"] == "ready" for node in (await nodes(client)).values())


def counted(**counts: Any) -> ClusterOptions:
    return ClusterOptions(**{"prefill": 0, "decode": 0, **counts})


SPLIT = counted(prefill=2, decode=2)  # a node is killed, and requests are moved
BOTH = counted(both=2)  # which speculate
RANKS = counted(
    prefill=1,
    decode=1,
    prefill_options=("engine.parallel.pp=2",),
    decode_options=("engine.parallel.tp=2",),
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        pytest.param(
            SPLIT,
            {"prefill", "decode", "transfer", "migration", "detokenize", "stream", "api"},
            id="split",
        ),
        pytest.param(BOTH, {"prefill", "decode", "prompts", "speculation", "api"}, id="both"),
        pytest.param(RANKS, {"prefill", "decode", "transfer", "exchange", "api"}, id="ranks"),
    ],
)
async def test_the_parts_are_what_clients_wait(
    tmp_path: Path, counts: ClusterOptions, expected: set[str]
) -> None:
    config, seen = replace(small_config(), cluster=counts), Seen()
    if counts is BOTH:
        config = replace(
            config, engine=replace(config.engine, speculative=SpeculativeOptions(method="ngram"))
        )

    def kill_one() -> None:
        if counts is SPLIT:
            kill(cluster, "decode-0")

    async with LocalCluster(config, directory=tmp_path) as cluster, Client(cluster.url) as client:
        await load(client, seen, kill_one, moves=counts is SPLIT)
        await eventually(lambda: all_ready(client))
    assert expected <= seen.names.keys(), seen.names
    assert (seen.most_attempts > 1) == (counts is SPLIT)
    assert len(seen.client_s) == NUM_REQUESTS * 49 // 50
    # The rest is in sockets, while one of two event loops is busy with another request: as long as that of a
    # request which takes no time itself.
    rest_s = len(seen.client_s) * fmean(seen.healthz_s)
    assert sum(seen.parts_s) + rest_s == pytest.approx(sum(seen.client_s), rel=0.1)
