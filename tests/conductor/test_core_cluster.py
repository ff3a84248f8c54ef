"""Nodes come, go, lapse and return; Redis too. Who is placed on, and what becomes of requests."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest

from moonpool.conductor.fleet.node_client import DecodeClient
from moonpool.conductor.observing.request_metrics import ClusterCounts
from moonpool.doctor.evidence import Evidence
from moonpool.doctor.nodes import check_security
from moonpool.kvstore.blocks.keys import BlockKey
from moonpool.kvstore.index.redis.kv_index import replay
from moonpool.kvstore.index.redis.node_record import EXTERNAL_ROLE, NodeRecord
from moonpool.protos import node_pb2
from moonpool.runtime.config.security_options import SecurityOptions
from moonpool.runtime.security import process
from tests.conductor.core_nodes import (
    LAYOUT,
    PROMPT,
    RedisProcess,
    ScriptedNode,
    continuation,
    redis_process,
    request,
    running,
)


@pytest.fixture
def redis() -> Iterator[RedisProcess]:
    with redis_process() as server:
        yield server


class Gate:
    """A script that waits before one index, until opened."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._open = asyncio.Event()
        self.reached = asyncio.Event()

    async def __call__(self, node: ScriptedNode, work: node_pb2.Work, index: int) -> None:
        if index == self._index:
            self.reached.set()
            await self._open.wait()

    def open(self) -> None:
        self._open.set()


async def test_readiness_follows_the_nodes(redis: RedisProcess) -> None:
    async with running(redis.url) as cluster:
        conductor = cluster.conductor
        assert conductor.ready() == (False, ["no prefill node is available", "no decode node is available"])
        await cluster.add("p0")
        await cluster.add("d0")
        assert conductor.ready() == (True, [])
        await cluster.add("d1")
        await cluster.nodes["d1"].die()
        await cluster.until(lambda: conductor.ready()[1])
        ready, degraded = conductor.ready()
        assert ready
        assert "d1" in degraded[0]
        # Once its lease has lapsed it is not a node any more, and nothing is amiss.
        await cluster.until(lambda: conductor.ready() == (True, []))
        assert {node["node_id"] for node in conductor.cluster()["nodes"]} == {"p0", "d0"}


async def test_open_processes_and_certificates_that_end_are_told(redis: RedisProcess) -> None:
    before = process.current()
    async with running(redis.url, "p0", "d0") as cluster:
        conductor, node = cluster.conductor, cluster.nodes["d0"]
        node.record = replace(node.record, extra={"warnings": ["its certificate ends"]})
        await node.announce()
        await cluster.until(lambda: conductor.ready() == (True, ["node d0: its certificate ends"]))
        process.use(process.Security(SecurityOptions(insecure=True), process.current().me))
        try:
            shown = conductor.cluster()
        finally:
            process.use(before)
        assert any("security.insecure" in sentence for sentence in shown["degraded"])
        first, *_, last = [(one.what, one.state, one.fact) for one in check_security(Evidence(shown))]
        assert first[0] == "the conductor" and "security.insecure" in first[2]
        assert last == ("d0", "wrong", "its certificate ends")


async def test_a_draining_node_gets_nothing_new_and_finishes_what_it_has(redis: RedisProcess) -> None:
    async with running(redis.url, "p0", "d0", migrate=()) as cluster:
        gate = cluster.nodes["d0"].script = Gate(4)
        asked = asyncio.create_task(cluster.generate(request()))
        await gate.reached.wait()
        await cluster.add("d1")
        cluster.nodes["d0"].state = "draining"
        await cluster.nodes["d0"].announce()
        await cluster.until(lambda: cluster.state("d0") == "draining")
        for i in range(4):
            await cluster.generate(request(f"after-{i}"))
        assert len(cluster.nodes["d1"].works) == 4
        await cluster.nodes["d0"].publisher.close()
        await cluster.until(lambda: cluster.state("d0") == "")
        gate.open()
        assert await asked == continuation(PROMPT, 8)
        assert "retry" not in cluster.names("r")


async def test_a_node_that_falls_silent_loses_its_requests_when_its_lease_ends(redis: RedisProcess) -> None:
    async with running(redis.url, "p0", "d0", "d1") as cluster:
        # As SIGSTOP does: the connection stands, nothing comes.
        gates = {name: Gate(4) for name in ("d0", "d1")}
        for name, gate in gates.items():
            cluster.nodes[name].script = gate
        asked = asyncio.create_task(cluster.generate(request()))
        await cluster.until(lambda: any(gate.reached.is_set() for gate in gates.values()))
        silent = next(name for name, gate in gates.items() if gate.reached.is_set())
        other = "d1" if silent == "d0" else "d0"
        gates[other].open()
        publishing = cluster.nodes[silent].publisher._task
        assert publishing is not None
        publishing.cancel()
        assert await asked == continuation(PROMPT, 8)
        assert cluster.names("r").count("retry") == 1
        # It hears of the cancel as soon as it can be reached.
        await cluster.until(lambda: ("r", 0) in cluster.nodes[silent].cancelled)
        assert ("r", 1) not in cluster.nodes[other].cancelled


async def test_a_node_that_was_away_for_longer_than_its_lease_ends_what_nobody_waits_for(
    redis: RedisProcess,
) -> None:
    """Continued after SIGSTOP it has the requests it had, and never heard that they went elsewhere."""
    async with running(redis.url, "p0", "d0") as cluster:
        stopped = cluster.nodes["d0"]
        gate = stopped.script = Gate(4)
        asked = asyncio.create_task(cluster.generate(request(max_tokens=1000)))
        await gate.reached.wait()
        other = await cluster.add("d1")
        stopped.deaf = True
        publishing = stopped.publisher._task
        assert publishing is not None
        publishing.cancel()
        await cluster.until(lambda: cluster.state("d0") == "")
        assert await asked == continuation(PROMPT, 1000)
        assert not stopped.cancelled
        assert not other.cancelled
        stopped.deaf = False
        await stopped.publisher.start()
        await cluster.until(lambda: cluster.state("d0") == "ready")
        gate.open()
        await cluster.until(lambda: ("r", 0) in stopped.cancelled)


async def test_a_node_back_in_a_new_life_is_used_again(redis: RedisProcess) -> None:
    async with running(redis.url, "p0", "d0") as cluster:
        first = cluster.nodes["d0"]
        await first.die()
        asked = asyncio.create_task(cluster.generate(request()))
        await cluster.add("d0")
        assert cluster.nodes["d0"].record.epoch > first.record.epoch
        assert await asked == continuation(PROMPT, 8)


async def test_serving_goes_on_without_redis_and_after_it_came_back_empty(redis: RedisProcess) -> None:
    async with running(redis.url, "p0", "p1", "d0", "d1") as cluster:
        gate = cluster.nodes["d0"].script = cluster.nodes["d1"].script = Gate(4)
        asked = asyncio.create_task(cluster.generate(request()))
        await gate.reached.wait()
        redis.kill()
        await cluster.until(lambda: cluster.conductor.ready()[1])
        assert cluster.conductor.ready()[0]
        assert "Redis" in cluster.conductor.ready()[1][0]
        gate.open()
        assert await asked == continuation(PROMPT, 8)
        assert await cluster.generate(request("new")) == continuation(PROMPT, 8)
        # Without Redis it is the connections that tell who is there.
        await cluster.nodes["d0"].die()
        await cluster.until(lambda: cluster.state("d0") == "unreachable")
        for i in range(4):
            assert await cluster.generate(request(f"more-{i}")) == continuation(PROMPT, 8)
        redis.start()
        await cluster.until(lambda: cluster.conductor.ready() == (True, []))
        assert await cluster.generate(request("again")) == continuation(PROMPT, 8)
        assert "retry" not in cluster.names("again")
        told = [one["text"] for one in cluster.conductor.activity()["events"] if one["kind"] == "resync"]
        assert any(text.startswith("keeps what it has: ") for text in told)
        assert told[-1].startswith("in step with Redis again: ")


async def test_evictions_in_bulk_are_an_event(redis: RedisProcess) -> None:
    async with running(redis.url, "p0", "d0") as cluster:
        node, evicted = cluster.nodes["p0"], {"pool": {"dropped": 1000}}
        for evicted["pool"]["dropped"] in (1000, 2000):
            node.record = replace(node.record, extra={"evicted": evicted})
            await node.announce()

        def told() -> list[str]:
            events = cluster.conductor.activity()["events"]
            return [one["text"] for one in events if (one["kind"], one["node"]) == ("evicted", "p0")]

        await cluster.until(told)
        assert told()[0].startswith("1,000 of 4,096 blocks were evicted from pool within ")


async def test_a_cancel_reaches_a_node_that_could_not_be_reached(redis: RedisProcess) -> None:
    async with running(redis.url, "p0", "d0") as cluster:
        node = cluster.nodes["d0"]
        client = cluster.conductor._deps.registry.members["d0"].client
        assert isinstance(client, DecodeClient)
        await node.stop_serving()
        await cluster.until(lambda: not client.connected)
        client.cancel(("r", 3))
        await node.serve(node.port)
        await cluster.until(lambda: node.cancelled == [("r", 3)])


async def test_nodes_of_another_model_or_shape_are_shown_and_not_used(redis: RedisProcess) -> None:
    async with running(redis.url, "p0", "d0") as cluster:
        for name, change in (("d1", {"layout": "00" * 16}), ("d2", {"model": "tiny-2"})):
            stranger = ScriptedNode(cluster.index, name, "decode")
            stranger.record = replace(stranger.record, **change)
            cluster.nodes[name] = await stranger.start()
            await cluster.until(lambda name=name: cluster.state(name) == "incompatible")
        for i in range(6):
            await cluster.generate(request(f"r{i}"))
        assert cluster.nodes["d1"].works == cluster.nodes["d2"].works == []
        ready, degraded = cluster.conductor.ready()
        assert ready
        assert "another engine.block_size" in degraded[0]
        assert "another revision" in degraded[1]
        # When the old revision is gone, the new one is what is served, also where it has joined before.
        for name in ("p4", "d4"):
            node = ScriptedNode(cluster.index, name, "prefill" if name == "p4" else "decode")
            node.record = replace(node.record, model="tiny-2")
            cluster.nodes[name] = await node.start()
            await cluster.until(lambda name=name: cluster.state(name) == "incompatible")
        await cluster.nodes["p0"].leave()
        await cluster.nodes["d0"].leave()
        await cluster.until(lambda: cluster.state("p4") == cluster.state("d4") == "ready")
        assert await cluster.generate(request("newer")) == continuation(PROMPT, 8)
        for name in ("d2", "p4", "d4"):
            await cluster.nodes[name].leave()
        for name in ("p3", "d3"):
            node = ScriptedNode(cluster.index, name, "prefill" if name == "p3" else "decode")
            node.record = replace(node.record, model="tiny-2")
            cluster.nodes[name] = await node.start()
        await cluster.until(lambda: cluster.state("p3") == cluster.state("d3") == "ready")
        assert await cluster.generate(request("new")) == continuation(PROMPT, 8)


async def test_the_last_node_of_a_revision_may_restart(redis: RedisProcess) -> None:
    """A stray node of another one does not take its place meanwhile."""
    async with running(redis.url, "p0", "d0", namespace="restart-of-the-last") as cluster:
        stray = ScriptedNode(cluster.index, "d1", "decode")
        stray.record = replace(stray.record, model="tiny-2")
        cluster.nodes["d1"] = await stray.start()
        await cluster.until(lambda: cluster.state("d1") == "incompatible")
        await cluster.nodes["d0"].leave()
        await cluster.until(lambda: "d0" not in cluster.conductor.nodes)
        await cluster.add("p0")
        await cluster.add("d0")
        assert cluster.state("d1") == "incompatible"
        assert await cluster.generate(request()) == continuation(PROMPT, 8)


async def test_a_record_that_makes_no_sense_harms_nobody(redis: RedisProcess) -> None:
    async with running(redis.url, "p0", "d0") as cluster:
        record = NodeRecord(
            "d1",
            1,
            "decode",
            rpc_address="nowhere:x",
            layout=LAYOUT,
            model="tiny-1",
            kv_address=b"\xff\xff",
        )
        await cluster.index.register(record, ttl_s=30.0)
        await cluster.until(lambda: len(cluster.conductor.cluster()["nodes"]) == 3)
        await cluster.add("d2")
        for i in range(4):
            assert await cluster.generate(request(f"r{i}")) == continuation(PROMPT, 8)


async def test_estimates_follow_what_nodes_report(redis: RedisProcess) -> None:
    async with running(redis.url, "p0", "d0") as cluster:
        for i in range(40):
            await cluster.generate(request(f"r{i}", max_tokens=20))
        errors = cluster.conductor.cluster()["prediction_errors"]
        assert errors["prefill"]["count"] == errors["transfer"]["count"] == errors["ttft"]["count"] == 40
        assert errors["step"]["count"] >= 40
        node = next(n for n in cluster.conductor.cluster()["nodes"] if n["node_id"] == "p0")
        # It says 1 ms for what its profile predicts at 1.24 ms.
        assert node["prefill_correction"] == pytest.approx(1 / 1.24, rel=0.05)
        assert errors["prefill"]["p50_percent"] < 5


async def test_what_is_counted_is_what_is_shown(redis: RedisProcess) -> None:
    async with running(redis.url, "p0", "d0", "d1") as cluster:
        await cluster.nodes["d1"].die()
        await cluster.until(
            lambda: cluster.conductor.ready()[1] or len(cluster.conductor.cluster()["nodes"]) < 3
        )
        nodes, counts = cluster.conductor.cluster()["nodes"], cluster.conductor.counts()
        assert counts.nodes == Counter((node["role"], node["state"]) for node in nodes)
        pools = [tier for node in nodes for tier in node["tiers"] if tier["name"] == "pool"]
        assert counts.num_used_blocks == sum(pool["num_used_blocks"] for pool in pools)
        assert counts.num_blocks == sum(pool["num_blocks"] for pool in pools) > 0


async def test_the_largest_difference_of_clocks_is_a_metric(redis: RedisProcess) -> None:
    async with running(redis.url, "p0", "d0", namespace="clocks") as cluster:
        node, core = cluster.nodes["d0"], cluster.conductor
        node.record = replace(node.record, unix_s=time.time() - 5.0)
        for _ in range(4):
            await node.announce()
        # It grows by the age of the record, which says its time once and for all.
        await cluster.until(lambda: core.counts().clock_skew_s > 0)
        assert 5.0 <= core.counts().clock_skew_s < 60.0
        other = ClusterCounts(clock_skew_s=2.0)
        other.add(core.counts())
        assert other.clock_skew_s >= 5.0, "of all models, the largest"


async def test_the_cost_of_a_link_is_what_its_nodes_say_of_it(redis: RedisProcess) -> None:
    async with running(redis.url, "p0", "d0") as cluster:
        links = cluster.conductor._deps.registry._cost_model.links

        def seconds() -> float:
            return links.seconds("p0", "d0", 1_000_000_000, 0.0)

        for rate in (20e9, 1e8):
            node = cluster.nodes["d0"]
            node.record = replace(node.record, links={"p0": rate})
            await cluster.until(lambda rate=rate: seconds() == pytest.approx(1e9 / rate, rel=0.1))
            shown = next(n for n in cluster.conductor.cluster()["nodes"] if n["node_id"] == "d0")
            assert shown["links_nbytes_per_s"] == {"p0": rate}


async def test_an_engine_that_is_not_ours_is_in_the_index_and_never_called(redis: RedisProcess) -> None:
    async with running(redis.url, "p0", "d0") as cluster:
        mirror = cluster.conductor._deps.registry.mirror
        record = NodeRecord("vllm-0", 1, EXTERNAL_ROLE)
        await cluster.index.register(record, ttl_s=30.0)
        await cluster.index.heartbeat(record, ttl_s=30.0)
        await mirror.caught_up()
        assert "vllm-0" in mirror.nodes
        assert await cluster.generate(request("one")) == continuation(PROMPT, 8)
        assert [node["node_id"] for node in cluster.conductor.cluster()["nodes"]] == ["d0", "p0"]
        await cluster.index.deregister("vllm-0", 1)
        await mirror.caught_up()
        assert await cluster.generate(request("two")) == continuation(PROMPT, 8)


async def test_the_index_of_a_large_node_is_read_in_parts(url: str) -> None:
    async with running(url, "p0", "d0", namespace="parts") as cluster:
        node, conductor = cluster.nodes["p0"], cluster.conductor
        node.hold([BlockKey(random.randbytes(16)) for _ in range(20_000)])
        await cluster.until(lambda: conductor._deps.registry.mirror.num_blocks == 20_000)
        num_turns = 0

        async def other_work() -> None:
            nonlocal num_turns
            while True:
                num_turns += 1
                await asyncio.sleep(0)

        work = asyncio.create_task(other_work())
        parts = [part async for part in conductor.index_blocks("p0")]
        work.cancel()
        assert replay(parts) == node.held
        assert num_turns >= len(parts) >= 4
        assert [part async for part in conductor.index_blocks("unknown")] == []
