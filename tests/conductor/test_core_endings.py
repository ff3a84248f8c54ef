"""How requests end that do not run to their end: refused, late, cancelled, closed."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from moonpool.conductor.errors import (
    ConductorClosed,
    DeadlineExceeded,
    DuplicateRequest,
    NoNodes,
    RequestInvalid,
    RequestRejected,
)
from moonpool.conductor.request import TokenEvent
from tests.conductor.core_nodes import (
    PROMPT,
    continuation,
    obedient,
    request,
    running,
)
from tests.conductor.faults import hangs, once


async def test_what_fits_nowhere_is_invalid(url: str) -> None:
    async with running(url, "p0", "d0", namespace="large") as cluster:
        with pytest.raises(RequestInvalid, match="4100 tokens and 8 more"):
            await cluster.generate(request(prompt=[5] * 4100))
        for node in cluster.nodes.values():
            node.load = type(node.load)(num_blocks=4, free_blocks=4)
            await node.announce()
        await cluster.until(lambda: cluster.conductor.cluster()["nodes"][0]["load"]["num_blocks"] == 4)
        await cluster.until(lambda: cluster.conductor.cluster()["nodes"][1]["load"]["num_blocks"] == 4)
        with pytest.raises(RequestInvalid, match="holds 63"):
            await cluster.generate(request("b", prompt=[5] * 64))
        assert await cluster.generate(request("c", prompt=[5] * 63)) == continuation([5] * 63, 8)


async def test_without_a_node_of_a_role_it_says_which(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moonpool.conductor.planning.on_demand.NODE_WAIT_S", 0.2)
    async with running(url, "p0", namespace="alone") as cluster:
        with pytest.raises(NoNodes) as raised:
            await cluster.generate(request())
        assert raised.value.role == "decode"
        assert cluster.names("r") == ["queued", "waits_for_node", "done"]


async def test_a_node_that_comes_in_time_is_waited_for(url: str) -> None:
    async with running(url, "p0", namespace="wait") as cluster:
        asked = asyncio.create_task(cluster.generate(request()))
        await cluster.until(lambda: "waits_for_node" in cluster.names("r"))
        await cluster.add("d0")
        assert await asked == continuation(PROMPT, 8)


@pytest.mark.parametrize("index", [0, 3])
async def test_the_deadline_ends_it_everywhere(url: str, index: int) -> None:
    async with running(url, "p0", "d0", namespace=f"deadline-{index}") as cluster:
        for node in cluster.nodes.values():
            node.script = once(index or 1 if node.role == "decode" else index, hangs)
        with pytest.raises(DeadlineExceeded) as raised:
            await cluster.generate(request(deadline_s=1.5))  # enough for the tokens before it
        assert raised.value.num_tokens == index
        await cluster.until(lambda: ("r", 0) in cluster.nodes["d0"].cancelled)
        if index == 0:
            await cluster.until(lambda: ("r", 0) in cluster.nodes["p0"].cancelled)
        # A deadline is no node's fault.
        assert cluster.state("p0") == cluster.state("d0") == "ready"
        assert await cluster.generate(request("next")) == continuation(PROMPT, 8)


@pytest.mark.parametrize("index", [0, 3])
async def test_closing_the_stream_cancels_it_everywhere(url: str, index: int) -> None:
    async with running(url, "p0", "d0", namespace=f"close-{index}") as cluster:
        for node in cluster.nodes.values():
            node.script = once(index or 1 if node.role == "decode" else index, hangs)

        async def consume() -> None:
            async with contextlib.aclosing(cluster.conductor.generate(request())) as stream:
                async for _ in stream:
                    pass

        consumer = asyncio.create_task(consume())
        busy = cluster.nodes["d0" if index else "p0"]
        await cluster.until(lambda: busy.works and (index == 0 or "first_token" in cluster.names("r")))
        consumer.cancel()
        with pytest.raises(asyncio.CancelledError):
            await consumer
        await cluster.until(lambda: ("r", 0) in cluster.nodes["d0"].cancelled)
        if index == 0:
            await cluster.until(lambda: ("r", 0) in cluster.nodes["p0"].cancelled)
        assert cluster.conductor.cluster()["num_requests"] == 0
        timeline = cluster.conductor.timeline("r")
        assert timeline is not None
        assert timeline.summary.finish_reason == "cancelled"


async def test_unread_blocks_are_released_on_the_prefill_node(url: str) -> None:
    async with running(url, "p0", "d0", namespace="untaken") as cluster:
        cluster.nodes["d0"].tell = lambda *a: None  # type: ignore[method-assign]  # never says it has them
        stream = cluster.conductor.generate(request())
        await anext(stream)
        await stream.aclose()
        await cluster.until(lambda: cluster.nodes["p0"].cancelled == [("r", 0)])


async def test_requests_beyond_the_limit_and_doubles_are_refused(url: str) -> None:
    async with running(url, "p0", "d0", namespace="limit", max_requests=2) as cluster:
        cluster.nodes["d0"].script = hangs
        streams = [cluster.conductor.generate(request(f"r{i}")) for i in range(2)]
        for stream in streams:
            await anext(stream)
        with pytest.raises(RequestRejected, match="2 requests are in flight") as raised:
            await cluster.generate(request("more"))
        assert raised.value.retry_after_s > 0
        await streams[0].aclose()
        with pytest.raises(DuplicateRequest):
            await cluster.generate(request("r1"))
        await streams[1].aclose()
        cluster.nodes["d0"].script = obedient
        assert await cluster.generate(request("r1")) == continuation(PROMPT, 8)


async def test_closing_the_conductor_ends_what_is_in_flight(url: str) -> None:
    async with running(url, "p0", "d0", namespace="closing") as cluster:
        cluster.nodes["d0"].script = once(3, hangs)
        events: list[TokenEvent] = []

        async def consume() -> None:
            async for event in cluster.conductor.generate(request()):
                events.append(event)

        consumer = asyncio.create_task(consume())
        # The node hangs before its next token: one under way would make the conductor repeat the cancel.
        await cluster.until(lambda: len(events) == 3)
        await cluster.conductor.close()
        with pytest.raises(ConductorClosed):
            await consumer
        assert cluster.nodes["d0"].cancelled == [("r", 0)]
        with pytest.raises(ConductorClosed):
            await cluster.generate(request("late"))
