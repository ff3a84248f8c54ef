"""Operations on one object or a few, beside an empty call to the same node and a copy of the same bytes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial

import numpy as np

from moonpool.bench.harness.command import Run
from moonpool.bench.harness.sizes import KIB, MIB, size_name
from moonpool.bench.harness.turns import Call, compared, repeat, spread, turns
from moonpool.bench.store.blocks import Bytes, Settings
from moonpool.bench.store.remote_objects import session
from moonpool.kvstore.client import StoreClient
from moonpool.protos import store_pb2
from moonpool.runtime.reports.report import Row

_TURN_S = 0.15
_SMALL_NBYTES = 4 * KIB
_IN_FLIGHT = 8
_BATCH = 64
_NAMES = 512
_BARE = "bare call"


@dataclass(frozen=True, slots=True)
class _Case:
    """``once`` does ``count`` operations. ``limits``: what cannot be faster, by name."""

    name: str
    count: int
    once: Callable[[], Awaitable[object]]
    limits: Mapping[str, Callable[[], object]]

    @property
    def contestants(self) -> dict[str, Call]:
        calls = {"moonpool": self.once, **self.limits}
        return {name: partial(repeat, call, _TURN_S) for name, call in calls.items()}


async def small_rows(run: Run, settings: Settings) -> AsyncIterator[Row]:
    """Latency of single operations, and operations a second of several at a time."""
    async with AsyncExitStack() as stack:
        client = (await stack.enter_async_context(session())).client
        memory = np.random.default_rng(1).integers(0, 256, 2 * MIB, np.uint8)
        # The client knows the memory beforehand.
        stack.enter_context(client.registered(memory))
        for case in [case async for case in _cases(client, memory)]:
            run.say(case.name)
            seconds = await turns(case.contestants, run.rounds, warm_up=0)
            for row in _rows(case, seconds):
                yield row


def _rows(case: _Case, seconds: dict[str, list[float]]) -> Iterator[Row]:
    if case.count == 1:
        yield spread(case.name, "latency", seconds["moonpool"], "ms", 1e3)
        yield from compared(case.name, "beside", "ms", seconds, lambda median_s: 1e3 * median_s)
    else:
        yield from compared(case.name, "rate", "1/s", seconds, lambda median_s: case.count / median_s)


async def _cases(client: StoreClient, memory: Bytes) -> AsyncIterator[_Case]:
    value, into = memory[:MIB], memory[MIB:]
    small = value[:_SMALL_NBYTES]
    names = [f"small {n}" for n in range(_BATCH)]
    await client.batch_put({"large": value, "small": small, **dict.fromkeys(names, small)})
    (node,) = (await client.nodes()).values()

    def bare(count: int = 1) -> Callable[[], Awaitable[object]]:
        async def call() -> None:
            request = store_pb2.AbortRequest()
            await asyncio.gather(*(node.call("Abort", request) for _ in range(count)))

        return call

    alone = {_BARE: bare()}
    copied = {**alone, "memcpy": lambda: np.copyto(into, value)}
    yield _Case(f"small/get/{size_name(MIB)}", 1, lambda: client.get_into("large", into), copied)
    yield _Case(f"small/put/{size_name(MIB)}", 1, lambda: client.put("large", value), copied)
    name = size_name(_SMALL_NBYTES)
    yield _Case(f"small/get/{name}", 1, lambda: client.get("small"), alone)
    yield _Case(f"small/put/{name}", 1, lambda: client.put("small", small), alone)
    yield _Case("small/exists", 1, lambda: client.exists("small"), alone)
    asked = [*names, *(f"none {n}" for n in range(_NAMES - _BATCH))]
    yield _Case(f"small/exists/batch of {_NAMES}", _NAMES, lambda: client.batch_exists(asked), alone)
    yield _Case(
        f"small/get/{name}/{_IN_FLIGHT} in flight",
        _IN_FLIGHT,
        lambda: asyncio.gather(*map(client.get, names[:_IN_FLIGHT])),
        {_BARE: bare(_IN_FLIGHT)},
    )
    yield _Case(f"small/get/{name}/batch of {_BATCH}", _BATCH, lambda: client.batch_get(names), alone)
