"""Nodes that fail a request: it goes on elsewhere, and no token is missing or repeated."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from moonpool.conductor.errors import RequestEndsLives, RequestFailed, RequestInvalid, RequestRejected
from moonpool.conductor.placing.placement import Placement
from moonpool.protos import node_pb2
from tests.conductor.core_nodes import (
    PROMPT,
    Script,
    ScriptedNode,
    Wrong,
    continuation,
    lineage,
    request,
    running,
)
from tests.conductor.faults import Lives, breaks, dies, ends, hangs, is_busy, once


@pytest.mark.parametrize("fault", [dies, breaks, is_busy])
async def test_a_prefill_node_that_fails_is_replaced(url: str, fault: Script) -> None:
    async with running(url, "p0", "p1", "d0", "d1", namespace=f"p-{fault.__name__}") as cluster:
        for name in ("p0", "p1"):
            cluster.nodes[name].script = once(0, fault)
            if fault is dies:
                break  # the other one must live
        assert await cluster.generate(request()) == continuation(PROMPT, 8)


@pytest.mark.parametrize("index", [1, 4, 7])
@pytest.mark.parametrize("fault", [dies, breaks])
async def test_a_decode_node_that_fails_is_replaced_without_a_missing_or_repeated_token(
    url: str, fault: Script, index: int
) -> None:
    async with running(url, "p0", "d0", "d1", namespace=f"d-{fault.__name__}-{index}") as cluster:
        script = once(index, fault)
        for name in ("d0", "d1"):
            cluster.nodes[name].script = script
        assert await cluster.generate(request()) == continuation(PROMPT, 8)
        assert cluster.names("r").count("retry") == 1
        work = cluster.nodes["p0"].works[-1]
        assert (work.attempt, work.num_prompt_tokens) == (1, 40)
        # Tokens on their way when a node died are lost with it, and drawn again.
        streamed = lineage(work)[len(PROMPT) :]
        assert streamed == continuation(PROMPT, len(streamed))
        assert len(streamed) <= index
        assert work.sampling.max_tokens == 8


@pytest.mark.parametrize("index", [0, 3], ids=["prefill", "decode"])
async def test_a_request_that_ends_nodes_is_refused_after_two_and_takes_no_other_with_it(
    url: str, index: int
) -> None:
    names = ("p0", "p1", "d0", "d1")
    async with running(url, *names, namespace=f"poison-{index}") as cluster:
        # Warm nodes take several requests at once.
        for number in range(16):
            await cluster.generate(request(f"warm-{number}"))
        lives = Lives("poison", index, num_others=3)
        for name in names:
            cluster.nodes[name].script = lives
        others = [request(f"other-{number}", [number, *PROMPT]) for number in range(3)]
        running_others = asyncio.gather(*map(cluster.generate, others))
        with pytest.raises(RequestEndsLives, match="2 nodes lost a rank or their device") as refused:
            await cluster.generate(request("poison", PROMPT))
        assert str(refused.value).count("it ended by signal 9") == 2
        assert await running_others == [continuation([number, *PROMPT], 8) for number in range(3)]
        assert len(lives.ended) == 2
        # Others were in the first step; they have their turns one by one, and it has its own.
        assert lives.ended[1] == {"poison"}


async def test_a_request_in_such_steps_by_chance_is_served(url: str) -> None:
    """With a token in between: one that ends every node has none."""
    async with running(url, "p0", "d0", "d1", namespace="chance") as cluster:
        for name, index in (("d0", 2), ("d1", 2), ("p0", 4)):
            cluster.nodes[name].script = once(index, ends)
        cluster.nodes["d1"].script = cluster.nodes["d0"].script
        assert await cluster.generate(request()) == continuation(PROMPT, 8)
        assert "retry" in cluster.names("r")


async def test_a_prefill_node_that_dies_before_its_blocks_arrived_takes_the_attempt_with_it(url: str) -> None:
    async with running(url, "p0", "p1", "d0", namespace="handover") as cluster:
        silent = cluster.nodes["d0"]
        tell = silent.tell
        silent.tell = lambda *a: None  # type: ignore[method-assign]  # nothing arrives
        stream = cluster.conductor.generate(request())
        tokens = [(await anext(stream)).token_id]
        timeline = cluster.conductor.timeline("r")
        assert timeline is not None
        await cluster.nodes[timeline.summary.prefill_node].die()
        silent.tell = tell  # type: ignore[method-assign]
        tokens += [event.token_id async for event in stream]
        assert tokens == continuation(PROMPT, 8)


async def test_a_prefill_node_that_dies_after_the_handover_is_not_missed(url: str) -> None:
    async with running(url, "p0", "d0", namespace="after") as cluster:
        gate = asyncio.Event()

        async def wait(node: ScriptedNode, work: node_pb2.Work, index: int) -> None:
            await gate.wait()

        cluster.nodes["d0"].script = once(3, wait)
        tokens = []
        async for event in cluster.conductor.generate(request()):
            tokens.append(event.token_id)
            if event.index == 2:
                await cluster.nodes["p0"].die()
                await cluster.until(lambda: cluster.state("p0") != "ready")
                gate.set()
        assert tokens == continuation(PROMPT, 8)
        assert "retry" not in cluster.names("r")


async def test_late_tokens_of_an_attempt_that_was_given_up_are_ignored(url: str) -> None:
    async with running(url, "p0", "d0", "d1", namespace="late") as cluster:
        first: list[ScriptedNode] = []

        async def skip(node: ScriptedNode, work: node_pb2.Work, index: int) -> None:
            """Claims a token from the future, and goes on talking whatever it is told."""
            first.append(node)
            conductor_id = next(iter(node._outboxes))
            for late in range(index + 1, index + 20):
                node.tell(conductor_id, node.token(work, late, 9))
            node._tasks.pop((work.request_id, work.attempt), None)

        script = once(3, skip)
        for name in ("d0", "d1"):
            cluster.nodes[name].script = script
        assert await cluster.generate(request()) == continuation(PROMPT, 8)
        assert len(first) == 1


async def test_a_repeated_token_is_streamed_once(url: str) -> None:
    async with running(url, "p0", "d0", namespace="twice") as cluster:

        async def repeat(node: ScriptedNode, work: node_pb2.Work, index: int) -> None:
            node.tell(next(iter(node._outboxes)), node.token(work, index - 1, 9))

        cluster.nodes["d0"].script = once(4, repeat)
        assert await cluster.generate(request()) == continuation(PROMPT, 8)
        assert "retry" not in cluster.names("r")


async def test_after_the_last_attempt_it_fails_with_the_cause(url: str) -> None:
    async with running(url, "p0", "d0", namespace="last", max_attempts=3) as cluster:
        cluster.nodes["p0"].script = breaks
        with pytest.raises(RequestFailed, match="out of luck") as raised:
            await cluster.generate(request())
        assert raised.value.attempts == 3
        assert cluster.names("r").count("retry") == 3
        assert cluster.names("r")[-1] == "done"


async def test_tokens_renew_the_attempts(url: str) -> None:
    """A long stream outlives more failures than attempts are allowed without a token between them."""
    # The lease outlives any pause of the machine: a node that is lost would be one failure more.
    async with running(url, "p0", "d0", "d1", namespace="renew", max_attempts=2, lease_ttl_s=60.0) as cluster:
        broken, received = set[int](), list[int]()

        async def breaks_often(node: ScriptedNode, work: node_pb2.Work, index: int) -> None:
            if index % 4 == 3 and index not in broken:
                broken.add(index)
                # A real one cannot break before its prefill has answered.
                await cluster.until(lambda: len(received) >= index)
                await breaks(node, work, index)

        for name in ("d0", "d1"):
            cluster.nodes[name].script = breaks_often
        async for event in cluster.conductor.generate(request(max_tokens=24)):
            received.append(event.token_id)
        assert received == continuation(PROMPT, 24)
        assert cluster.names("r").count("retry") == len(broken) == 6


async def test_a_node_that_failed_it_is_left_for_one_that_warms_up(url: str) -> None:
    """Nodes that warm up and have enough come after open ones, and before one that has failed the request."""
    async with running(url, "p0", "d0", "d1", namespace="warms", lease_ttl_s=60.0) as cluster:
        gate, held = asyncio.Event(), asyncio.Queue[str]()

        async def holds(node: ScriptedNode, work: node_pb2.Work, index: int) -> None:
            if work.request_id == "first":
                held.put_nowait(node.node_id)
                await gate.wait()

        for name in ("d0", "d1"):
            cluster.nodes[name].script = holds
        first = asyncio.create_task(cluster.generate(request("first")))
        warms = await held.get()
        cluster.nodes["d1" if warms == "d0" else "d0"].script = breaks
        assert await cluster.generate(request()) == continuation(PROMPT, 8)
        assert cluster.names("r").count("retry") == 1
        gate.set()
        assert await first == continuation(PROMPT, 8)


async def test_where_only_prefills_succeed_each_brings_a_token(url: str) -> None:
    async with running(url, "p0", "d0", namespace="barren", max_attempts=2, lease_ttl_s=60.0) as cluster:
        tokens: list[int] = []

        async def breaks_after_the_prefill(node: ScriptedNode, work: node_pb2.Work, index: int) -> None:
            await cluster.until(lambda: len(tokens) >= index)
            await breaks(node, work, index)

        cluster.nodes["d0"].script = breaks_after_the_prefill
        began_s = asyncio.get_running_loop().time()
        async with contextlib.aclosing(cluster.conductor.generate(request(max_tokens=5))) as stream:
            async for event in stream:
                tokens.append(event.token_id)
        assert tokens == continuation(PROMPT, 5)
        assert cluster.names("r").count("retry") == 4
        # Not as fast as prefills can be made, for each token is one.
        assert asyncio.get_running_loop().time() - began_s > 0.2


@pytest.mark.parametrize("behind", [1, 2])
async def test_a_finish_reason_on_a_streamed_token_ends_the_stream(url: str, behind: int) -> None:
    async with running(url, "p0", "d0", namespace=f"finish-{behind}", request_timeout_s=20.0) as cluster:

        async def finish_late(node: ScriptedNode, work: node_pb2.Work, index: int) -> None:
            token = node.token(work, index - behind, 9)
            token.finish_reason = node_pb2.FINISH_STOP
            node.tell(next(iter(node._outboxes)), token)
            await asyncio.Event().wait()

        cluster.nodes["d0"].script = once(4, finish_late)
        events = await cluster.events(request())
        assert [event.token_id for event in events] == [*continuation(PROMPT, 4), -1]
        assert events[-1].finish_reason == "stop"


async def test_a_node_that_leaves_before_its_request_arrives_is_replaced(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(url, "p0", "p1", "d0", "d1", namespace="leaves") as cluster:
        arbitration = cluster.conductor._deps.arbitration
        members = cluster.conductor._deps.registry.members
        left: list[str] = []

        async def book(placement: Placement, num_blocks: int) -> Placement:
            assert placement.decode is not None
            leaving = [placement.prefill.node_id, placement.decode.node_id]
            if len(left) < 2:
                left.append(leaving[len(left)])
                await cluster.nodes[left[-1]].leave()
                await cluster.until(lambda: left[-1] not in members)
            return placement

        monkeypatch.setattr(arbitration, "book", book)
        assert await cluster.generate(request()) == continuation(PROMPT, 8)
        assert len(left) == 2
        assert "retry" not in cluster.names("r")


async def test_nodes_that_are_all_busy_reject_it(url: str) -> None:
    async with running(url, "p0", "d0", namespace="busy", max_attempts=2) as cluster:
        cluster.nodes["p0"].script = is_busy
        with pytest.raises(RequestRejected, match="no room"):
            await cluster.generate(request())


async def test_what_a_node_finds_wrong_is_not_tried_again(url: str) -> None:
    async def is_wrong(node: ScriptedNode, work: node_pb2.Work, index: int) -> None:
        raise Wrong("bad bias")

    async with running(url, "p0", "p1", "d0", namespace="wrong") as cluster:
        for name in ("p0", "p1"):
            cluster.nodes[name].script = is_wrong
        with pytest.raises(RequestInvalid, match="bad bias"):
            await cluster.generate(request())
        assert "retry" not in cluster.names("r")


async def test_a_node_that_restarts_elsewhere_takes_no_prefill_along(url: str) -> None:
    """Its former process is cut off, not dead: the connection stands, and is closed by the conductor."""
    async with running(url, "p0", "d0", namespace="elsewhere") as cluster:
        former = cluster.nodes["p0"]
        former.script = hangs
        stream = cluster.conductor.generate(request(max_tokens=1))
        token = asyncio.create_task(anext(stream))
        await cluster.until(lambda: former.works)
        await cluster.add("p0")
        async with asyncio.timeout(60):
            assert (await token).token_id == continuation(PROMPT, 1)[0]
        await stream.aclose()
        await former.die()


async def test_a_node_that_comes_back_at_its_address_keeps_its_tokens(url: str) -> None:
    """The client of its former life does not take them."""
    async with running(url, "p0", "d0", namespace="same-address") as cluster:
        former = cluster.nodes["d0"]
        assert await cluster.generate(request("before")) == continuation(PROMPT, 8)
        await former.leave()
        await cluster.until(lambda: "d0" not in cluster.conductor.nodes)
        node = cluster.nodes["d0"] = ScriptedNode(cluster.index, "d0", "decode")
        await node.serve(former.port)
        await node.publisher.start()
        await cluster.until(lambda: cluster.state("d0") == "ready")
        for number in range(20):
            assert await cluster.generate(request(f"r{number}")) == continuation(PROMPT, 8)
            assert "retry" not in cluster.names(f"r{number}")
        assert node.cancelled == []


async def test_a_node_at_the_address_of_one_that_crashed_has_its_tokens(url: str) -> None:
    """Long before the lease of that one ends."""
    async with running(url, "p0", "d0", namespace="taken-address", lease_ttl_s=120.0) as cluster:
        crashed = cluster.nodes["d0"]
        assert await cluster.generate(request("before")) == continuation(PROMPT, 8)
        await crashed.die()
        node = cluster.nodes["d1"] = ScriptedNode(cluster.index, "d1", "decode", lease_ttl_s=120.0)
        await node.serve(crashed.port)
        await node.publisher.start()
        await cluster.until(lambda: cluster.state("d1") == "ready")
        assert "d0" not in cluster.conductor.nodes
        for number in range(20):
            assert await cluster.generate(request(f"r{number}")) == continuation(PROMPT, 8)
            assert "retry" not in cluster.names(f"r{number}")
        assert node.cancelled == []


async def test_a_node_that_has_moved_stays_when_another_gets_its_former_address(url: str) -> None:
    async with running(url, "p0", "d0", namespace="moved") as cluster:
        former = cluster.nodes["d0"]
        await former.leave()
        await cluster.until(lambda: "d0" not in cluster.conductor.nodes)
        await cluster.add("d0")
        node = cluster.nodes["d1"] = ScriptedNode(cluster.index, "d1", "decode")
        await node.serve(former.port)
        await node.publisher.start()
        await cluster.until(lambda: cluster.state("d1") == "ready")
        assert cluster.state("d0") == "ready"


@pytest.mark.parametrize("name", ["d0", "p0"])
async def test_a_defect_in_the_watch_of_a_node_counts_as_the_loss_of_its_connection(
    url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    async with running(url, "p0", "d0", namespace=f"watch-{name}") as cluster:
        client = cluster.conductor._deps.registry.members[name].client
        if name == "d0":
            right = client._on_step

            def wrong(step: node_pb2.StepTokens, num_delivered: int) -> None:
                client._on_step = right
                raise KeyError("a defect")

            client._on_step = wrong
        else:
            get_state = client._channel.get_state

            def wrong_state(try_to_connect: bool = False) -> object:
                monkeypatch.setattr(client._channel, "get_state", get_state)
                raise KeyError("a defect")

            monkeypatch.setattr(client._channel, "get_state", wrong_state)
            port = cluster.nodes[name].port
            await cluster.nodes[name].stop_serving()
            await cluster.until(lambda: "a defect" in caplog.text)
            assert not client.connected
            await cluster.nodes[name].serve(port)
        assert await cluster.generate(request()) == continuation(PROMPT, 8)
        assert "KeyError: 'a defect'" in caplog.text
        assert client.connected


@pytest.mark.parametrize("direct", [True, False])
async def test_a_node_whose_grpc_connection_is_lost_is_gone(url: str, direct: bool) -> None:
    """Its direct connection stands."""
    names = ("p0", "d0", "d1")
    async with running(url, namespace=f"stands-{direct}") as cluster:
        for name in names:
            await cluster.add(name, direct=direct)
        hanging: asyncio.Future[ScriptedNode] = asyncio.get_running_loop().create_future()

        async def hangs_once(node: ScriptedNode, work: node_pb2.Work, index: int) -> None:
            if index == 3 and not hanging.done():
                hanging.set_result(node)
                await asyncio.Event().wait()

        for name in ("d0", "d1"):
            cluster.nodes[name].script = hangs_once
        answer = asyncio.create_task(cluster.generate(request()))
        node = await hanging
        over_grpc = node._server._grpc
        await over_grpc.stop(None)
        async with asyncio.timeout(60):
            assert await answer == continuation(PROMPT, 8)
        assert "retry" in cluster.names("r")
