"""One request through the core: what is streamed, and where it goes."""

from __future__ import annotations

import asyncio
import contextlib
import time
from types import SimpleNamespace

import pytest

from moonpool.conductor.observing import scheduling_metrics as core_metrics
from moonpool.conductor.observing.timelines.parts import parts_of
from moonpool.conductor.request import SamplingParams
from moonpool.conductor.requests import recorder
from moonpool.kvstore.blocks.keys import chain
from moonpool.protos import node_pb2
from tests.conductor.core_nodes import (
    MODEL,
    PROMPT,
    ScriptedNode,
    continuation,
    lineage,
    request,
    running,
)
from tests.conductor.faults import breaks, hangs, once


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


async def test_a_stream_that_another_conductor_began_is_timed_from_its_first_token_here(url: str) -> None:
    async with running(url, "p0", "d0", namespace="goes-on", slo_tbt_s=60.0) as cluster:
        begun = tuple(continuation(PROMPT, 3))
        stream = cluster.conductor.generate(request(output_ids=begun, follows=True))
        async with contextlib.aclosing(stream):
            assert [event.token_id async for event in stream] == continuation(PROMPT, 8)[3:]
        timeline = cluster.conductor.timeline("r")
        assert timeline is not None
        summary = timeline.summary
        assert (summary.output_tokens, summary.ttft_s) == (8, 0.0)
        assert 0 < summary.tpot_s < summary.e2e_s
        # The planner and rollouts judge by this.
        demand = cluster.conductor._deps.activity.demand.total
        assert (demand.num_decoded, demand.num_tbt_within, demand.num_first_tokens) == (1, 1, 0)


async def test_parts_are_counted_and_what_its_reader_takes_is_not_the_nodes(url: str) -> None:
    def counted() -> dict[str, float]:
        (family,) = core_metrics.part_s.collect()
        return {one.labels["part"]: one.value for one in family.samples if one.name.endswith("_total")}

    async with running(url, "p0", "d0", namespace="parts") as cluster:
        asked, node, before = request(), cluster.nodes["d0"], counted()
        goes_on, held_s = asyncio.Event(), 0.0

        async def waits(node: ScriptedNode, work: node_pb2.Work, index: int) -> None:
            await goes_on.wait()

        node.script = waits
        async with contextlib.aclosing(cluster.conductor.generate(asked)) as stream:
            async for event in stream:
                came_s = time.monotonic()
                if event.token_id >= 0 and not held_s:
                    # Its reader takes the first token when the node has produced all others.
                    goes_on.set()
                    await cluster.until(lambda: node.works and not node._tasks)
                    held_s = time.monotonic() - came_s
                    asked.delivery.add(detokenize_s=0.0, stream_s=held_s)
        timeline = cluster.conductor.timeline("r")
        assert timeline is not None
        parts = {part.name: part.seconds for part in parts_of(timeline.to_dict())}
        assert parts == {part.name: part.seconds for part in parts_of(timeline.times())}
        assert sum(parts.values()) == pytest.approx(timeline.summary.e2e_s, rel=0.02)
        assert parts["stream"] == pytest.approx(held_s)
        assert sum(parts.values()) - parts["stream"] < timeline.summary.e2e_s - 0.9 * held_s
        grown = {name: seconds - before.get(name, 0.0) for name, seconds in counted().items()}
        assert {name: pytest.approx(seconds) for name, seconds in grown.items() if seconds} == parts


async def test_what_moved_is_counted_by_path_and_speed(url: str) -> None:
    def counted() -> set[tuple[str, str]]:
        (family,) = core_metrics.first_token_moves.collect()
        return {
            (one.labels["path"], one.labels["speed"])
            for one in family.samples
            if one.name.endswith("_count") and one.value
        }

    async with running(url, "p0", "d0", namespace="moved") as cluster:
        before = counted()
        cluster.nodes["p0"].prefill_facts = {"fetched_nbytes": 2_000_000, "fetch_s": 0.001, "load_s": 0.002}
        await cluster.generate(request())
        assert counted() - before <= {("fetched", "10"), ("loaded", "")} <= counted()


@pytest.mark.parametrize("jump_s", [3600.0, -3600.0])
async def test_a_wall_clock_that_jumps_moves_no_time_of_a_request(
    url: str, monkeypatch: pytest.MonkeyPatch, jump_s: float
) -> None:
    # Not the module's own: gRPC adds its timeouts to that.
    jumped = SimpleNamespace(time=lambda: time.time() + jump_s)
    async with running(url, "p0", "d0", namespace="jump") as cluster:
        tokens, began_s = [], time.monotonic()
        async with contextlib.aclosing(cluster.conductor.generate(request())) as stream:
            async for event in stream:
                tokens.append(event.token_id)
                if len(tokens) == 3:
                    monkeypatch.setattr(recorder, "time", jumped)
        took_s = time.monotonic() - began_s
        assert tokens == continuation(PROMPT, 8)
        timeline = cluster.conductor.timeline("r")
        assert timeline is not None
        told = timeline.to_dict()
        # Beside a Unix time a float has no more digits.
        assert told["events"][-1]["at_s"] == pytest.approx(timeline.summary.e2e_s, abs=1e-5)
        assert 0 < timeline.summary.e2e_s <= took_s
        assert sum(part.seconds for part in parts_of(told)) == pytest.approx(timeline.summary.e2e_s, rel=0.02)
        # The next one does not care either: bookings, queues and breakers go by the monotonic clock.
        assert await cluster.generate(request("next")) == continuation(PROMPT, 8)


async def test_nodes_are_told_the_seconds_that_a_request_has_left(url: str) -> None:
    async with running(url, "p0", "d0", namespace="left", request_timeout_s=50.0) as cluster:
        began_s = time.monotonic()
        cluster.nodes["p0"].script = once(0, breaks)
        await cluster.generate(request(deadline_s=30.0))
        took_s = time.monotonic() - began_s
        by_attempt = [
            [w.left_s for n in cluster.nodes.values() for w in n.works if w.attempt == i] for i in (0, 1)
        ]
        for left in by_attempt:
            assert left and all(30.0 - took_s <= left_s < 30.0 for left_s in left)
            assert len(set(left)) == 1, "both stages end at once"
        # Measured when it is sent: the second attempt has less.
        assert max(by_attempt[1]) < min(by_attempt[0])
        began_s = time.monotonic()
        await cluster.generate(request("next"))
        took_s = time.monotonic() - began_s
        assert 50.0 - took_s <= cluster.nodes["d0"].works[-1].left_s <= 50.0


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


async def test_the_next_turn_goes_where_its_blocks_are(url: str) -> None:
    async with running(url, "p0", "p1", "d0", "d1", namespace="turns") as cluster:
        registry = cluster.conductor._deps.registry
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
        assert (timeline.summary.reason, timeline.summary.prefix_outcome) == ("locality", "hit")
        assert (timeline.summary.prefill_node, timeline.summary.decode_node) == ("p1", "d1")
        # Another tenant's equal tokens are not equal blocks.
        await cluster.generate(request("other", prompt=prompt, tenant="other"))
        other = cluster.conductor.timeline("other")
        assert other is not None
        assert (other.summary.reason, other.summary.prefix_outcome) == ("load", "salted")


async def test_a_prefix_worth_fetching_names_its_holder(url: str) -> None:
    async with running(url, "p0", "d0", namespace="fetch") as cluster:
        registry = cluster.conductor._deps.registry
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
