"""A model without a node: a request starts the first ones, and they end when none comes for long."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast
from uuid import uuid4

import pytest

from moonpool.conductor.admission.tenants import Tenant
from moonpool.conductor.api.errors import as_api_error
from moonpool.conductor.errors import NoNodes
from moonpool.conductor.fleet.errors import ProviderFailed
from moonpool.conductor.fleet.providers.provider import FAILED, RUNNING, STARTING, STOPPING, SuppliedNode
from moonpool.conductor.planning import on_demand, supply
from moonpool.conductor.planning.lease import Held, PlannerLease
from moonpool.kvstore.index.redis.node_record import STAGES
from moonpool.runtime.config.options import PlannerOptions
from moonpool.runtime.service.vital import cancel_and_wait
from tests.conductor.core_nodes import (
    LEASE_TTL_S,
    PROMPT,
    Cluster,
    Script,
    ScriptedNode,
    continuation,
    obedient,
    request,
    running,
)

ON_DEMAND = PlannerOptions(min_warm=0)


class Machines:
    """A provider of scripted nodes. ``cluster``: where they join, once ``may_join`` is set."""

    name = "fake"

    def __init__(self) -> None:
        self.cluster: Cluster | None = None
        self.may_join = asyncio.Event()
        self.may_join.set()
        self.fails: ProviderFailed | None = None
        self.script: Script = obedient
        self.facts: dict[str, Any] = {}  # of the records of its nodes
        self.is_reachable = asyncio.Event()
        self.is_reachable.set()
        self.num_listed = 0  # calls
        self.at_once = 1  # so many lists are made before the first is answered
        self.may_list = asyncio.Event()
        self.num_stops_lost = 0
        self.on_stop: Callable[[], Awaitable[None]] | None = None
        self.started: list[str] = []
        self.stopped: list[str] = []
        self.states: dict[str, SuppliedNode] = {}
        self._joins: list[asyncio.Task[None]] = []

    async def start(self, role: str, model: str, fence: int = 0) -> str:
        if self.fails is not None:
            raise self.fails
        node_id = f"{role[0]}{len(self.started)}"
        self.started.append(node_id)
        self.states[node_id] = SuppliedNode(node_id, role, STARTING)
        self._joins.append(asyncio.create_task(self._join(node_id)))
        return node_id

    async def _join(self, node_id: str) -> None:
        await self.may_join.wait()
        assert self.cluster is not None
        role = {"p": "prefill", "d": "decode"}[node_id[0]]
        node = ScriptedNode(self.cluster.index, node_id, role, self.script)
        node.record = replace(node.record, **self.facts)
        self.cluster.nodes[node_id] = node
        await node.serve(0)
        if not self.is_reachable.is_set():
            await node.stop_serving()
        await node.publisher.start()
        await self.is_reachable.wait()
        if node._stopping is not None:
            await node.serve(node.port)
        self.states[node_id] = replace(self.states[node_id], state=RUNNING)

    async def stop(self, node_id: str, fence: int = 0) -> None:
        assert self.cluster is not None
        if self.num_stops_lost:
            self.num_stops_lost -= 1
            raise ProviderFailed("it did not answer")
        if node_id not in self.stopped:
            self.stopped.append(node_id)
            self.states[node_id] = replace(self.states[node_id], state=STOPPING)
            await self.cluster.nodes[node_id].leave()
            if self.on_stop is not None:
                await self.on_stop()

    async def list(self) -> Sequence[SuppliedNode]:
        self.num_listed += 1
        known = list(self.states.values())
        if self.num_listed >= self.at_once:
            self.may_list.set()
        await self.may_list.wait()
        return known

    async def close(self) -> None:
        """Those on their way join: a server that is not stopped keeps gRPC from ever ending."""
        self.may_join.set()
        self.is_reachable.set()
        await asyncio.gather(*self._joins)


async def test_the_first_request_starts_the_nodes_and_waits_for_them(url: str) -> None:
    machines = Machines()
    machines.may_join.clear()
    async with running(url, namespace=uuid4().hex, provider=machines, planner=ON_DEMAND) as cluster:
        machines.cluster = cluster
        assert cluster.conductor.ready()[0], "it can serve, if not at once"
        asked = [asyncio.create_task(cluster.generate(request(name))) for name in ("a", "b", "c")]
        await cluster.until(lambda: len(machines.started) == 2)
        machines.may_join.set()
        assert await asyncio.gather(*asked) == [continuation(PROMPT, 8)] * 3
        assert {name[0] for name in machines.started} == {"p", "d"}
        assert "waits_for_node" in cluster.names("a")
        assert await cluster.generate(request("d")) == continuation(PROMPT, 8)
        assert len(machines.started) == 2


async def test_two_conductors_start_one_node_of_each_role(url: str) -> None:
    machines, namespace = Machines(), uuid4().hex
    machines.at_once = 2
    async with (
        running(url, namespace=namespace, provider=machines, planner=ON_DEMAND) as one,
        running(url, namespace=namespace, provider=machines, planner=ON_DEMAND) as two,
    ):
        machines.cluster = one
        both = await asyncio.gather(one.generate(request("a")), two.generate(request("b")))
        assert list(both) == [continuation(PROMPT, 8)] * 2
        assert sorted(name[0] for name in machines.started) == ["d", "p"]


async def test_another_conductor_goes_on_where_the_one_that_starts_nodes_dies(url: str) -> None:
    machines, namespace = Machines(), uuid4().hex
    async with running(url, namespace=namespace, provider=machines, planner=ON_DEMAND) as cluster:
        machines.cluster = cluster
        dies = PlannerLease(
            cluster.index, "dies", ttl_s=LEASE_TTL_S, clock=time.monotonic, name="first_nodes"
        )
        held = await dies.take()
        await machines.start("prefill", "tiny")
        asked = asyncio.create_task(cluster.generate(request()))
        await cluster.until(lambda: len(machines.started) == 2)
        assert time.monotonic() >= held.until_s, "it waited for the other one"
        assert await asked == continuation(PROMPT, 8)
        assert machines.started == ["p0", "d1"]


async def test_a_request_whose_deadline_is_shorter_is_told_when_to_come_back(url: str) -> None:
    machines = Machines()
    machines.may_join.clear()
    async with running(url, namespace=uuid4().hex, provider=machines, planner=ON_DEMAND) as cluster:
        machines.cluster = cluster
        with pytest.raises(NoNodes, match=r"starts, and may serve in \d+ s") as caught:
            await cluster.generate(request(deadline_s=0.5))
        answer = as_api_error(caught.value)
        assert (answer.status, answer.error_code) == (503, "no_nodes")
        assert 1 < int(answer.headers["Retry-After"]) <= 30
        machines.may_join.set()
        assert await cluster.generate(request("later")) == continuation(PROMPT, 8)
        assert len(machines.started) == 2, "the nodes of the first request"


async def test_a_provider_that_fails_is_named_and_not_asked_at_once_again(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(on_demand, "NODE_WAIT_S", 0.2)
    machines = Machines()
    machines.fails = ProviderFailed("no machine is free")
    async with running(url, namespace=uuid4().hex, provider=machines, planner=ON_DEMAND) as cluster:
        for name in ("a", "b"):
            with pytest.raises(NoNodes, match=r"none is asked for within .* no machine is free") as caught:
                await cluster.generate(request(name))
            assert caught.value.retry_after_s > 1


async def test_a_node_that_fails_to_start_is_named(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_demand, "NODE_WAIT_S", 0.2)
    machines = Machines()
    machines.may_join.clear()
    async with running(url, namespace=uuid4().hex, provider=machines, planner=ON_DEMAND) as cluster:
        machines.cluster = cluster
        asked = asyncio.create_task(cluster.generate(request()))
        await cluster.until(lambda: len(machines.started) == 2)
        machines.states["p0"] = replace(machines.states["p0"], state=FAILED, reason="has no weights")
        with pytest.raises(NoNodes, match="p0 has no weights"):
            await asked


async def test_nodes_that_have_joined_and_cannot_be_reached_yet_are_waited_for(url: str) -> None:
    machines = Machines()
    machines.is_reachable.clear()
    async with running(url, namespace=uuid4().hex, provider=machines, planner=ON_DEMAND) as cluster:
        machines.cluster = cluster
        asked = asyncio.create_task(cluster.generate(request()))
        await cluster.until(lambda: len(cluster.conductor.nodes) == 2)
        num_listed = machines.num_listed
        await cluster.until(lambda: machines.num_listed >= num_listed + 3)
        assert machines.started == ["p0", "d1"]
        machines.is_reachable.set()
        assert await asked == continuation(PROMPT, 8)
        assert machines.started == ["p0", "d1"]


async def test_a_node_that_cannot_serve_the_model_is_named_and_starts_no_other(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(on_demand, "NODE_WAIT_S", 0.2)
    machines = Machines()
    machines.facts = {"layout": "other"}
    async with running(url, namespace=uuid4().hex, provider=machines, planner=ON_DEMAND) as cluster:
        machines.cluster = cluster
        with pytest.raises(NoNodes, match=r"it cannot serve here: .* another engine\.block_size"):
            await cluster.generate(request(deadline_s=30.0))
        await cluster.until(lambda: set(machines.stopped) == {"p0", "d1"})
        assert machines.started == ["p0", "d1"]


async def test_nodes_that_were_given_up_and_could_not_be_stopped_are_stopped_later(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(on_demand, "NODE_WAIT_S", 60.0)
    monkeypatch.setattr(supply, "_STOP_AGAIN_S", 0.1)
    machines = Machines()
    machines.facts = {"layout": "other"}
    machines.num_stops_lost = 1
    async with running(url, namespace=uuid4().hex, provider=machines, planner=ON_DEMAND) as cluster:
        machines.cluster = cluster
        asked = asyncio.create_task(cluster.generate(request()))
        await cluster.until(lambda: set(machines.stopped) == {"p0", "d1"})
        await cancel_and_wait(asked)


async def test_a_provider_that_fails_late_is_not_asked_at_once_again() -> None:
    """It took longer to fail than the pause after a failure is."""
    times, starts = [100.0], list[float]()

    async def supplied() -> Sequence[SuppliedNode]:
        return []

    async def start(role: str, why: str) -> str:
        starts.append(times[-1])
        times.append(times[-1] + 30.0)
        raise ProviderFailed("no answer within 30 s")

    nodes = alone(times, SimpleNamespace(provider="fake", supplied=supplied, start=start))
    nodes.ask()
    await nodes.round()
    prospect = nodes.ask()
    assert "no answer within 30 s" in prospect.why
    assert prospect.wait_s == on_demand.NODE_WAIT_S
    assert not nodes.decides, "the planner may borrow a node"
    times.append(131.0)
    await nodes.round()
    assert starts == [100.0]


async def test_nodes_that_stay_out_of_reach_are_named() -> None:
    times, calls = [100.0], list[str]()

    async def supplied() -> Sequence[SuppliedNode]:
        return [SuppliedNode("n", "both", RUNNING, age_s=times[-1] - 90.0)]

    async def start(role: str, why: str) -> str:
        calls.append(role)
        return "another"

    nodes = alone(times, SimpleNamespace(provider="fake", supplied=supplied, start=start), "n")
    for now_s in range(100, 130):
        times.append(float(now_s))
        assert nodes.ask().wait_s == math.inf
        await nodes.round()
        assert nodes.decides
    times.append(131.0)
    await nodes.round()
    assert "n: in the index, but out of reach for 30 s" in nodes.ask().why
    assert not nodes.decides, "a planner may start another one"
    assert calls == []


async def test_a_node_that_served_and_is_lost_for_a_moment_is_not_out_of_reach() -> None:
    times, serving = [100.0], []

    async def supplied() -> Sequence[SuppliedNode]:
        return [SuppliedNode("n", "both", RUNNING)]

    nodes = alone(times, SimpleNamespace(provider="fake", supplied=supplied), "n", serving=serving)
    nodes.ask()
    await nodes.round()
    serving.append("n")
    await nodes.round()
    serving.clear()
    times.append(140.0)
    assert nodes.ask().wait_s == math.inf
    await nodes.round()
    assert nodes.ask().wait_s == math.inf


def alone(
    times: list[float], admin: SimpleNamespace, *joined: str, serving: Sequence[str] = ()
) -> on_demand.OnDemand:
    """For one request that waits, with nodes that joined and that no request may go to."""

    async def take() -> Held:
        return Held("c", 1, math.inf)

    record = SimpleNamespace(load=SimpleNamespace(num_running=0, num_waiting=0))
    members = {name: SimpleNamespace(owner=name, record=record, stages=("prefill",)) for name in joined}
    registry = SimpleNamespace(members=members, available=lambda _: len(serving), incompatible=lambda _: "")
    return on_demand.OnDemand(
        cast(Any, registry),
        cast(Any, admin),
        cast(Any, SimpleNamespace(take=take, holds=lambda epoch: True)),
        roles=("both",),
        min_warm=0,
        idle_s=300.0,
        activity=lambda: (0, 1),
        clock=lambda: times[-1],
    )


async def test_a_request_that_may_not_go_to_the_nodes_that_serve_is_not_told_that_one_starts(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(on_demand, "NODE_WAIT_S", 0.2)
    machines, acme = Machines(), Tenant("acme", regions=frozenset({"eu"}))
    async with running(
        url, namespace=uuid4().hex, provider=machines, planner=ON_DEMAND, region="eu"
    ) as cluster:
        machines.cluster = cluster
        for name in ("p0", "d0"):
            await cluster.add(name, region="us")
        with pytest.raises(NoNodes, match="acme is confined to eu; nodes serve, so that none is started"):
            await cluster.generate(request(client=acme, tenant=acme.salt(""), deadline_s=10.0))
        assert machines.started == []


async def test_idle_nodes_end_and_the_next_request_starts_others(url: str) -> None:
    machines, planner = Machines(), PlannerOptions(min_warm=0, hold_s=0.5)
    async with running(url, namespace=uuid4().hex, provider=machines, planner=planner) as cluster:
        machines.cluster = cluster
        assert await cluster.generate(request("a")) == continuation(PROMPT, 8)
        await cluster.until(lambda: len(machines.stopped) == 2)
        assert set(machines.stopped) == set(machines.started)
        await cluster.until(lambda: not cluster.conductor.nodes)
        assert await cluster.generate(request("b")) == continuation(PROMPT, 8)
        assert len(machines.started) == 4


async def test_a_conductor_without_requests_leaves_the_nodes_that_another_one_starts(url: str) -> None:
    """Also where a store node, which serves no requests, is in the index."""
    machines, namespace = Machines(), uuid4().hex
    planner = PlannerOptions(min_warm=0, hold_s=0.5)
    async with (
        running(url, "s0", namespace=namespace, provider=machines, planner=planner) as a,
        running(url, namespace=namespace, provider=machines, planner=planner) as b,
    ):
        machines.cluster = a
        machines.may_join.clear()
        await b.until(lambda: "s0" in b.conductor.nodes)
        asked = asyncio.create_task(a.generate(request()))
        await a.until(lambda: len(machines.started) == 2)
        # Both look every PERIOD_S: by then the other one was idle for longer than hold_s.
        num_listed = machines.num_listed
        await a.until(lambda: machines.num_listed >= num_listed + 4)
        machines.may_join.set()
        assert await asked == continuation(PROMPT, 8)
        assert machines.stopped == []


async def test_a_request_that_comes_while_idle_nodes_end_keeps_those_that_are_left(url: str) -> None:
    machines, planner = Machines(), PlannerOptions(min_warm=0, hold_s=0.5)
    asked: list[asyncio.Task[list[int]]] = []
    async with running(url, namespace=uuid4().hex, provider=machines, planner=planner) as cluster:
        machines.cluster = cluster

        async def comes() -> None:
            asked.append(asyncio.create_task(cluster.generate(request("b"))))
            await cluster.until(lambda: cluster.conductor._deps.admission.num_requests)
            machines.on_stop = None

        machines.on_stop = comes
        assert await cluster.generate(request("a")) == continuation(PROMPT, 8)
        await cluster.until(lambda: asked)
        assert await asked[0] == continuation(PROMPT, 8)
        assert (len(machines.stopped), len(machines.started)) == (1, 3)


async def test_a_node_that_works_is_not_idle(url: str) -> None:
    machines, planner = Machines(), PlannerOptions(min_warm=0, hold_s=0.2)
    gate = asyncio.Event()

    async def waits(*_: object) -> None:
        await gate.wait()

    machines.script = waits
    async with running(url, namespace=uuid4().hex, provider=machines, planner=planner) as cluster:
        machines.cluster = cluster
        asked = asyncio.create_task(cluster.generate(request()))
        await cluster.until(lambda: any(node.works for node in cluster.nodes.values()))
        await asyncio.sleep(3 * on_demand.PERIOD_S)  # there would be time to end it
        stopped = list(machines.stopped)
        gate.set()
        assert (await asked, stopped) == (continuation(PROMPT, 8), [])


@pytest.mark.parametrize(
    ("provides", "min_warm", "why"),
    [(False, 0, "no provider that starts nodes"), (True, 1, "planner.min_warm is 1")],
)
async def test_where_nothing_is_started_the_answer_says_why(
    url: str, monkeypatch: pytest.MonkeyPatch, provides: bool, min_warm: int, why: str
) -> None:
    monkeypatch.setattr(on_demand, "NODE_WAIT_S", 0.2)
    provider, planner = Machines() if provides else None, PlannerOptions(min_warm=min_warm)
    async with running(url, namespace=uuid4().hex, provider=provider, planner=planner) as cluster:
        with pytest.raises(NoNodes, match=why):
            await cluster.generate(request())
        assert not cluster.conductor.ready()[0]
        assert provider is None or not provider.started


async def test_a_planner_starts_nothing_before_a_request_does(url: str) -> None:
    machines = Machines()
    planner = PlannerOptions(mode="act", min_warm=0, spare=0)
    async with running(url, namespace=uuid4().hex, provider=machines, planner=planner) as cluster:
        machines.cluster = cluster
        await cluster.until(lambda: "asleep" in cluster.conductor.planner()["state"])
        assert not machines.started
        assert await cluster.generate(request()) == continuation(PROMPT, 8)
        await cluster.until(lambda: "plans" in cluster.conductor.planner()["state"])


async def test_a_planner_leaves_the_first_nodes_to_the_request_that_waits_for_them(url: str) -> None:
    machines = Machines()
    machines.may_join.clear()
    planner = PlannerOptions(mode="act", min_warm=0, spare=0)
    async with running(url, namespace=uuid4().hex, provider=machines, planner=planner) as cluster:
        machines.cluster = cluster
        await cluster.until(lambda: "asleep" in cluster.conductor.planner()["state"])
        # Both see the same list, without a node.
        machines.may_list.clear()
        machines.num_listed, machines.at_once = 0, 2
        asked = asyncio.create_task(cluster.generate(request()))
        await cluster.until(lambda: len(machines.started) >= 2)
        num_listed = machines.num_listed
        await cluster.until(lambda: machines.num_listed >= num_listed + 4)  # both decided once more
        machines.may_join.set()
        assert await asked == continuation(PROMPT, 8)
        assert sorted(name[0] for name in machines.started) == ["d", "p"]
        await cluster.until(lambda: "plans" in cluster.conductor.planner()["state"])


async def test_a_node_that_comes_from_another_model_has_its_time() -> None:
    """The model sleeps, and nothing was asked of it for long."""
    times, stopped, members = [0.0], list[str](), dict[str, Any]()

    async def supplied() -> Sequence[SuppliedNode]:
        return [SuppliedNode(name, "both", RUNNING) for name in members]

    async def stop(node_id: str, why: str) -> None:
        stopped.append(node_id)

    admin = SimpleNamespace(provider="fake", supplied=supplied, stop=stop)
    nodes = on_demand.OnDemand(
        cast(Any, SimpleNamespace(members=members, available=lambda stage: len(members))),
        cast(Any, admin),
        cast(Any, None),
        roles=("both",),
        min_warm=0,
        idle_s=10.0,
        activity=lambda: (0, 0),
        clock=lambda: times[-1],
    )
    times.append(100.0)
    await nodes.round()
    load = SimpleNamespace(num_running=0, num_waiting=0)
    members["n"] = SimpleNamespace(owner="n", record=SimpleNamespace(load=load), stages=STAGES)
    for now_s in (101.0, 105.0, 110.0):
        times.append(now_s)
        await nodes.round()
        assert stopped == []
    times.append(112.0)
    await nodes.round()
    assert stopped == ["n"]
