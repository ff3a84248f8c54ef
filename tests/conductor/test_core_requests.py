"""One request's life: what is streamed, what is tried again, and what ends it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

import pytest

from conductor.errors import (
    ConductorClosed,
    DeadlineExceeded,
    DuplicateRequest,
    NoNodes,
    RequestFailed,
    RequestInvalid,
    RequestRejected,
)
from conductor.sampling import SamplingParams
from kvstore.keys import chain
from protos import node_pb2
from tests.conductor.core_nodes import (
    MODEL,
    PROMPT,
    Broken,
    Busy,
    RedisProcess,
    Script,
    ScriptedNode,
    Wrong,
    continuation,
    lineage,
    obedient,
    redis_process,
    request,
    running,
)


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisProcess]:
    with redis_process() as process:
        yield process


@pytest.fixture
def url(redis: RedisProcess) -> str:
    return redis.url


def once(index: int, fault: Script) -> Script:
    """``fault`` at the first token with this index, and never again."""
    done = False

    async def script(node: ScriptedNode, work: node_pb2.Work, at: int) -> None:
        nonlocal done
        if at == index and not done:
            done = True
            await fault(node, work, at)

    return script


async def dies(node: ScriptedNode, work: node_pb2.Work, index: int) -> None:
    await node.die()


async def hangs(node: ScriptedNode, work: node_pb2.Work, index: int) -> None:
    await asyncio.Event().wait()


async def breaks(node: ScriptedNode, work: node_pb2.Work, index: int) -> None:
    raise Broken("out of luck")


async def is_busy(node: ScriptedNode, work: node_pb2.Work, index: int) -> None:
    raise Busy("no room")


async def test_tokens_come_in_order_from_both_nodes(url: str) -> None:
    async with running(url, "p0", "d0", namespace="order") as cluster:
        events = await cluster.events(request())
        assert [event.token_id for event in events] == continuation(PROMPT, 8)
        assert [event.finish_reason for event in events] == [None] * 7 + ["length"]
        assert [event.num_cached_tokens for event in events] == [16] + [0] * 7
        work = cluster.nodes["d0"].works[0]
        assert work == cluster.nodes["p0"].works[0]
        assert (lineage(work), work.num_prompt_tokens, work.attempt) == (PROMPT, 40, 0)
        assert len(work.block_keys) == 2 * 16
        assert cluster.nodes["d0"].cancelled == []
        names = cluster.names("r")
        assert names == [
            *("queued", "placed", "prefix_loaded", "prefilled", "first_token", "transferred", "done")
        ]
        timeline = cluster.conductor.timeline("r")
        assert timeline is not None
        summary = timeline.summary
        assert (summary.prefill_node, summary.decode_node, summary.attempts) == ("p0", "d0", 1)
        assert (summary.cached_tokens, summary.output_tokens) == (16, 8)
        assert (summary.transferred_nbytes, summary.transport) == (4096, "shm")
        assert 0 < summary.ttft_s < summary.e2e_s
        assert summary.tpot_s > 0
        times = [event.unix_s for event in timeline.events]
        assert times == sorted(times)


async def test_one_token_needs_no_decode_node(url: str) -> None:
    async with running(url, "p0", namespace="single") as cluster:
        assert await cluster.generate(request(max_tokens=1)) == continuation(PROMPT, 1)
        assert not cluster.nodes["p0"].prefills[0].followed


async def test_a_first_token_that_ends_the_request_cancels_the_decode_node(url: str) -> None:
    async with running(url, "p0", "d0", namespace="eos") as cluster:
        cluster.nodes["p0"].stop_at = 0
        cluster.nodes["d0"].script = once(1, hangs)
        events = await cluster.events(request())
        assert [(event.token_id, event.finish_reason) for event in events] == [
            (continuation(PROMPT, 1)[0], "stop")
        ]
        await cluster.until(lambda: cluster.nodes["d0"].cancelled == [("r", 0)])


async def test_an_unseeded_request_gets_a_seed_that_stays(url: str) -> None:
    async with running(url, "p0", "p1", "d0", namespace="seed") as cluster:
        for name in ("p0", "p1"):
            cluster.nodes[name].script = once(0, breaks)
        await cluster.generate(request())
        works = [work for node in cluster.nodes.values() for work in node.works]
        assert len({work.sampling.seed for work in works}) == 1
        assert {work.attempt for work in works} == {0, 1, 2}
        seeded = SamplingParams(max_tokens=2, seed=-1)
        await cluster.generate(request("s", sampling=seeded))
        assert cluster.nodes["d0"].works[-1].sampling.seed == 2**64 - 1


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
    monkeypatch.setattr("conductor.request_run.NODE_WAIT_S", 0.2)
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
            await cluster.generate(request(deadline_s=0.3))
        assert raised.value.num_tokens == index
        await cluster.until(lambda: ("r", 0) in cluster.nodes["d0"].cancelled)
        if index == 0:
            await cluster.until(lambda: ("r", 0) in cluster.nodes["p0"].cancelled)
        # A deadline is nobody's fault.
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


async def test_an_id_used_again_is_not_taken_for_its_former_life(url: str) -> None:
    async with running(url, "p0", "d0", namespace="again") as cluster:
        node = cluster.nodes["d0"]
        node.script = once(1, hangs)
        stream = cluster.conductor.generate(request())
        await anext(stream)
        await cluster.until(lambda: node.works)
        former = node.works[0]
        await stream.aclose()

        async def late(node: ScriptedNode, work: node_pb2.Work, index: int) -> None:
            node.tell(next(iter(node._outboxes)), node.token(former, index, 9))

        node.script = once(2, late)
        assert await cluster.generate(request()) == continuation(PROMPT, 8)
        assert [work.attempt for work in node.works] == [0, 1]
        timeline = cluster.conductor.timeline("r")
        assert timeline is not None
        assert timeline.summary.attempts == 1


async def test_blocks_that_nobody_took_are_let_go_on_the_prefill_node(url: str) -> None:
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


async def test_the_next_turn_goes_where_its_blocks_are(url: str) -> None:
    async with running(url, "p0", "p1", "d0", "d1", namespace="turns") as cluster:
        registry = cluster.conductor._services.registry
        prompt = list(range(1000, 1200))
        keys = chain(
            registry.root_key("tenant") or b"", request(prompt=prompt).prompt_token_ids, MODEL.block_size
        )
        for name in ("p1", "d1"):
            cluster.nodes[name].hold(keys[:10])
            await cluster.nodes[name].publisher.flush()
        await cluster.until(lambda: len(registry.mirror.longest_prefix(keys)) == 2)
        await cluster.generate(request(prompt=prompt, tenant="tenant"))
        timeline = cluster.conductor.timeline("r")
        assert timeline is not None
        assert timeline.summary.reason == "locality"
        assert (timeline.summary.prefill_node, timeline.summary.decode_node) == ("p1", "d1")
        # Another tenant's equal tokens are not equal blocks.
        await cluster.generate(request("other", prompt=prompt, tenant="other"))
        other = cluster.conductor.timeline("other")
        assert other is not None
        assert other.summary.reason == "load"


async def test_a_prefix_worth_fetching_names_its_holder(url: str) -> None:
    async with running(url, "p0", "d0", namespace="fetch") as cluster:
        registry = cluster.conductor._services.registry
        prompt = list(range(2000, 4000))
        cluster.nodes["p0"].profile = {"prefill_token_s": 1e-3}
        await cluster.nodes["p0"].announce()
        profiles = lambda: [n["profile"] for n in cluster.conductor.cluster()["nodes"]]  # noqa: E731
        await cluster.until(lambda: {"prefill_token_s": 1e-3} in profiles())
        keys = chain(registry.root_key("") or b"", request(prompt=prompt).prompt_token_ids, MODEL.block_size)
        cluster.nodes["d0"].hold(keys)
        await cluster.nodes["d0"].publisher.flush()
        await cluster.until(lambda: registry.mirror.longest_prefix(keys).get("d0") == 125)
        await cluster.generate(request(prompt=prompt, max_tokens=2))
        asked = cluster.nodes["p0"].prefills[0]
        assert asked.fetch_from.node_id == "d0"
        assert asked.num_fetch_blocks == 124
        timeline = cluster.conductor.timeline("r")
        assert timeline is not None
        assert timeline.summary.reason == "transfer-beats-recompute"
        assert timeline.to_dict()["events"][1]["placement"]["prefill_candidates"][0]["fetch_from"] == "d0"


async def test_many_at_once_do_not_mix(url: str) -> None:
    async with running(url, "p0", "p1", "d0", "d1", namespace="many") as cluster:
        prompts = [[i] * (i % 40 + 1) for i in range(2, 66)]
        answers = await asyncio.gather(
            *(cluster.generate(request(f"r{i}", prompt=p, max_tokens=20)) for i, p in enumerate(prompts))
        )
        assert answers == [continuation(prompt, 20) for prompt in prompts]
        placed = {node["node_id"]: node["num_placed"] for node in cluster.conductor.cluster()["nodes"]}
        assert min(placed.values()) >= 16
        loads = [node["load"] for node in cluster.conductor.cluster()["nodes"]]
        assert all(load["own_prefills"] == load["own_decodes"] == load["own_queue_s"] == 0 for load in loads)


async def test_closing_the_conductor_ends_what_is_in_flight(url: str) -> None:
    async with running(url, "p0", "d0", namespace="closing") as cluster:
        cluster.nodes["d0"].script = once(3, hangs)
        asked = asyncio.create_task(cluster.generate(request()))
        await cluster.until(lambda: cluster.nodes["d0"].works)
        await cluster.conductor.close()
        with pytest.raises(ConductorClosed):
            await asked
        assert cluster.nodes["d0"].cancelled == [("r", 0)]
        with pytest.raises(ConductorClosed):
            await cluster.generate(request("late"))
