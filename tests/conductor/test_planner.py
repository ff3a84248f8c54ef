"""The planner's loop: one conductor plans at a time, on a real Redis, and what it does when things fail."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast
from uuid import uuid4

import pytest

from moonpool.conductor.costs.model import NodeCost, Profile
from moonpool.conductor.fleet.administration import FleetAdmin
from moonpool.conductor.fleet.errors import PlannerOutdated, ProviderFailed
from moonpool.conductor.fleet.providers.provider import (
    FAILED,
    RUNNING,
    STARTING,
    STOPPING,
    Provider,
    SuppliedNode,
)
from moonpool.conductor.fleet.registry import NodeRegistry
from moonpool.conductor.fleet.removal import Reuse
from moonpool.conductor.fleet.rollout.record import RUNNING as RUNNING_ROLLOUT
from moonpool.conductor.fleet.rollout.record import RolloutRecord, RolloutStatus
from moonpool.conductor.observing.demand import DemandCounter
from moonpool.conductor.observing.slo import Slo
from moonpool.conductor.placing.load_ledger import LoadLedger
from moonpool.conductor.placing.node_table import NodeTable
from moonpool.conductor.placing.node_view import NodeView
from moonpool.conductor.planning.lease import Held, PlannerLease
from moonpool.conductor.planning.plan import SWITCH, Bounds, Rules
from moonpool.conductor.planning.planner import Planner
from moonpool.kvstore.errors import IndexUnavailable
from moonpool.kvstore.index.redis.client import connect
from moonpool.kvstore.index.redis.kv_index import KVIndex
from moonpool.kvstore.index.redis.node_record import STAGES, NodeRecord
from moonpool.protos import node_pb2
from tests.conductor.core_nodes import RedisProcess

RULES = Rules({"prefill": Bounds(2, 6, 0), "decode": Bounds(1, 6, 0)}, hold_s=20.0, cooldown_s=5.0, steps=4)
FEW = Bounds(1, 5, 0)
TTL_S = 10.0


class Clock:
    """Monotonic seconds that a test sets; Redis keeps its own."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Fleet:
    """A provider and a registry at once: nodes that are asked for join at once, unless ``joins`` is False.

    ``refuses``: why no node can serve. ``is_reached``: the conductor connects to those that join. ``fails``:
    what its changes raise. ``is_silent``: it lists no nodes. ``before_start``: before each start.
    """

    name = "fake"

    def __init__(self, clock: Clock) -> None:
        self.namespace = uuid4().hex  # no test inherits another one's lease
        self.members: dict[str, Any] = {}
        self.nodes: dict[str, SuppliedNode] = {}
        self.fences: list[int] = []
        self.joins = True
        self.fails = ""
        self.is_silent = False
        self.refuses = ""
        self.is_reached = True
        self.before_start = lambda: None
        self._clock = clock
        self._tables = {"prefill": NodeTable(), "decode": NodeTable()}
        for role in self._tables:
            self.add(role)
        self.num_calls = 0

    def incompatible(self, record: NodeRecord) -> str:
        return self.refuses

    def fleet(self, role: str) -> NodeTable:
        return self._tables[role]

    def available(self, role: str) -> int:
        return len(self._tables[role])

    def add(self, role: str) -> str:
        name = f"{role}-{len(self.nodes)}"
        self.nodes[name] = SuppliedNode(name, role, RUNNING if self.joins else STARTING)
        if self.joins:
            self.join(name)
        return name

    def join(self, name: str) -> None:
        role, is_reached = self.nodes[name].role, self.is_reached
        view = NodeView(name, NodeCost(Profile(1e-3, 1e-4, 0.0, 1e-3, 1e-4, 0.0)), num_blocks=100)
        view.num_free_blocks = 100
        record = NodeRecord(name, 1, role, extra={"join_s": 4.0}, stages=STAGES)
        self.members[name] = SimpleNamespace(
            record=record,
            stages=(role,),
            node_id=name,
            owner=name,
            state="ready",
            reuse=Reuse(),
            view=view,
            load=LoadLedger(view, self._clock, lambda _: None),
            available=lambda now_s: is_reached,
            warming=False if is_reached else None,
            gated=False,
            first_token_s=None,
            client=SimpleNamespace(switch=partial(self._switch, name)),
        )
        self._tables[role].add(view)

    async def _switch(self, name: str, role: str) -> node_pb2.SwitchReply:
        self._called(0)
        member = self.members[name]
        self._tables[member.record.role].remove(member.view)
        self._tables[role].add(member.view)
        member.record = replace(member.record, role=role)
        return node_pb2.SwitchReply()

    def count(self, role: str) -> int:
        return sum(self.role_of(node) == role and node.counts for node in self.nodes.values())

    def role_of(self, node: SuppliedNode) -> str:
        member = self.members.get(node.node_id)
        return str(member.record.role) if member else node.role

    async def start(self, role: str, model: str, fence: int = 0) -> str:
        self.before_start()
        self._called(fence)
        return self.add(role)

    async def stop(self, node_id: str, fence: int = 0) -> None:
        self._called(fence)
        self.nodes[node_id] = replace(self.nodes[node_id], state=STOPPING)
        if member := self.members.pop(node_id, None):
            self._tables[member.record.role].remove(member.view)

    async def list(self) -> Sequence[SuppliedNode]:
        if self.is_silent:
            raise ProviderFailed("it does not answer")
        return list(self.nodes.values())

    async def close(self) -> None:
        pass

    def _called(self, fence: int) -> None:
        self.num_calls += 1
        self.fences.append(fence)
        if self.fails:
            raise ProviderFailed(self.fails)


@dataclass
class Made:
    planner: Planner
    lease: PlannerLease
    demand: DemandCounter = field(default_factory=DemandCounter)
    said: list[tuple[str, str, str]] = field(default_factory=list)


@asynccontextmanager
async def planner_of(
    url: str, clock: Clock, fleet: Fleet, name: str = "a", *, mode: str = "act", rules: Rules = RULES
) -> AsyncIterator[Made]:
    client = connect(url)
    demand, said = DemandCounter(), list[tuple[str, str, str]]()
    lease = PlannerLease(KVIndex(client, fleet.namespace, timeout_s=30.0), name, ttl_s=TTL_S, clock=clock)

    def decided(*event: str) -> None:
        said.append(cast(tuple[str, str, str], event))

    planner = Planner(
        cast(NodeRegistry, fleet),
        FleetAdmin(cast(NodeRegistry, fleet), fleet, "tiny", clock, lambda *change: None),
        lease,
        lambda: demand.total,
        mode=mode,
        rules=rules,
        slo=Slo(ttft_s=1.0, tbt_s=0.1),
        clock=clock,
        on_decision=decided,
    )
    try:
        yield Made(planner, lease, demand, said)
    finally:
        await client.aclose()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def fleet(clock: Clock) -> Fleet:
    return Fleet(clock)


async def test_it_adds_what_is_needed_and_removes_it_when_it_was_not_for_long(
    url: str, clock: Clock, fleet: Fleet
) -> None:
    async with planner_of(url, clock, fleet) as made:
        await made.planner.round()
        assert (fleet.count("prefill"), fleet.count("decode")) == (2, 1)
        for _ in range(4):  # 20 requests a second of 0.2 s each: four nodes compute
            clock.now_s += 5
            for _ in range(100):
                made.demand.arrived(0.2, 100, 0)
            await made.planner.round()
        assert fleet.count("prefill") in (5, 6)
        assert made.planner.status["roles"]["prefill"]["target"] == fleet.count("prefill")
        for _ in range(30):
            clock.now_s += 5
            await made.planner.round()
        assert fleet.count("prefill") == 2
        kinds = [text.partition(" ")[0] for _, _, text in made.said]
        assert kinds == sorted(kinds)  # all additions, then all removals
        assert set(fleet.fences) == {1}


async def test_nodes_change_their_role_where_the_needs_diverge_and_stay(
    url: str, clock: Clock, fleet: Fleet
) -> None:
    for _ in range(4):
        fleet.add("decode")
    rules = replace(RULES, can=frozenset({SWITCH}), lend_s=20.0, bounds=dict.fromkeys(RULES.bounds, FEW))
    async with planner_of(url, clock, fleet, rules=rules) as made:
        for _ in range(60):  # five minutes, 20 requests a second of 0.15 s each: three nodes compute
            clock.now_s += 5
            for _ in range(100):
                made.demand.arrived(0.15, 100, 0)
            await made.planner.round()
        assert (fleet.count("prefill"), fleet.count("decode")) == (4, 2)
        assert fleet.num_calls == 3
        assert all(text.startswith("switch decode-") for _, _, text in made.said)


async def test_two_planners_one_plans_and_the_other_takes_over_within_the_lease(
    url: str, redis: RedisProcess, clock: Clock, fleet: Fleet
) -> None:
    async with planner_of(url, clock, fleet, "a") as a, planner_of(url, clock, fleet, "b") as b:
        await asyncio.gather(a.planner.round(), b.planner.round())
        leads = [one for one in (a, b) if one.planner.status["state"].startswith("plans")]
        assert len(leads) == 1
        first, second = (a, b) if leads == [a] else (b, a)
        assert (fleet.count("prefill"), fleet.num_calls) == (2, 1)  # one asked, not both
        await first.lease.leave()
        await second.planner.round()
        assert second.planner.status["state"] == "plans, epoch 2"
        await first.planner.round()
        assert first.planner.status["state"] == f"{'b' if second is b else 'a'} plans"
        assert fleet.num_calls == 1


async def test_a_lease_that_lapsed_is_anothers_with_a_new_epoch(url: str, clock: Clock) -> None:
    client = connect(url)
    index = KVIndex(client, uuid4().hex)
    a = PlannerLease(index, "a", ttl_s=0.05, clock=clock)
    b = PlannerLease(index, "b", ttl_s=30.0, clock=clock)
    held = await a.take()
    assert (held.holder, held.epoch) == ("a", 1)
    assert a.holds(1)

    async def taken() -> bool:
        return (await b.take()).epoch > 0

    async with asyncio.timeout(60):
        while not await taken():  # noqa: ASYNC110 (Redis has the clock)
            await asyncio.sleep(0.01)
    clock.now_s += 0.06
    assert not a.holds(1)  # also before it is told
    assert (await a.take()).holder == "b"
    assert b.holds(2)
    await client.aclose()


async def test_a_redis_that_has_lost_its_data_gives_no_epoch_again(
    url: str, redis: RedisProcess, clock: Clock
) -> None:
    """Providers refuse an epoch older than they have seen: its planner could change nothing, for ever."""
    client = connect(url)
    index = KVIndex(client, uuid4().hex)
    a, b = (PlannerLease(index, name, ttl_s=TTL_S, clock=clock) for name in ("a", "b"))
    assert (await a.take()).epoch == 1
    await a.leave()
    assert (await b.take()).epoch == 2
    assert (await a.take()).epoch == 0
    redis.kill()
    with pytest.raises(IndexUnavailable):
        await a.take()
    redis.start()
    assert (await a.take()).epoch == 3
    assert (await b.take()).holder == "a"
    await client.aclose()


async def test_an_epoch_that_a_provider_has_seen_is_passed_while_the_lease_is_held(
    url: str, clock: Clock
) -> None:
    client = connect(url)
    index = KVIndex(client, uuid4().hex)
    a, b = (PlannerLease(index, name, ttl_s=TTL_S, clock=clock) for name in ("a", "b"))
    assert (await a.take()).epoch == 1
    one, other = (cast(Provider, object()) for _ in range(2))
    b.refused(PlannerOutdated("", 7), one)
    assert await b.take() == Held("a"), "another one's lease is left alone"
    a.refused(PlannerOutdated("", 5), one)
    a.refused(PlannerOutdated("", 3), one)
    assert (await a.take()).epoch == 6
    assert a.holds(6) and not a.holds(1)
    assert (await a.take()).epoch == 6
    a.accepted(6, one)
    a.refused(PlannerOutdated("", 9), one)
    assert (await a.take()).epoch == 6, "a later planner runs, with another Redis"
    a.refused(PlannerOutdated("", 9), other)
    assert (await a.take()).epoch == 10, "another model's provider has accepted nothing of it"
    await a.leave()
    assert (await b.take()).epoch == 11
    await client.aclose()


async def test_nor_a_rollout_an_epoch_of_one_before(url: str, redis: RedisProcess) -> None:
    client = connect(url)
    index = KVIndex(client, uuid4().hex)
    a, b = (RolloutRecord(index, ttl_s=TTL_S) for _ in range(2))
    running, done = RolloutStatus(RUNNING_ROLLOUT), RolloutStatus("done")
    for epoch in (1, 2):
        assert await a.begin(running) == epoch
        await a.save(epoch, done)
    assert await b.read() == (done, False)
    redis.kill()
    with pytest.raises(IndexUnavailable):
        await b.read()
    redis.start()
    assert await b.begin(running) == 3
    assert await a.begin(running) == 0
    await client.aclose()


async def test_a_planner_that_stalls_midway_makes_no_change_after_its_lease(
    url: str, clock: Clock, fleet: Fleet
) -> None:
    """The next one counts what the first has started, and starts only the rest."""
    rules = replace(RULES, bounds={"prefill": Bounds(5, 6, 0), "decode": Bounds(1, 6, 0)})

    def stall() -> None:
        clock.now_s += TTL_S + 1  # SIGSTOP, or a very slow provider

    fleet.before_start = stall
    async with planner_of(url, clock, fleet, "a", rules=rules) as a:
        await a.planner.round()
        assert fleet.count("prefill") == 2  # of four additions one was made
        await a.lease.leave()
    fleet.before_start = lambda: None
    async with planner_of(url, clock, fleet, "b", rules=rules) as b:
        await b.planner.round()
        assert fleet.count("prefill") == 5
        assert fleet.fences == [1, 2, 2, 2]


async def test_without_redis_it_pauses_and_goes_on_when_it_is_back(
    url: str, redis: RedisProcess, clock: Clock, fleet: Fleet
) -> None:
    rules = replace(RULES, bounds={"prefill": Bounds(1, 6, 0), "decode": Bounds(1, 6, 0)})
    async with planner_of(url, clock, fleet, rules=rules) as made:
        await made.planner.round()
        redis.kill()
        for name in list(fleet.members):
            await fleet.stop(name)  # all nodes seem to be gone
        num_calls = fleet.num_calls
        clock.now_s += 5
        await made.planner.round()
        assert made.planner.status["state"].startswith("paused: Redis does not answer")
        assert fleet.num_calls == num_calls
        redis.start()
        clock.now_s += 5
        await made.planner.round()
        assert fleet.num_calls == num_calls + 2


async def test_a_provider_that_fails_is_not_asked_again_at_once(url: str, clock: Clock, fleet: Fleet) -> None:
    async with planner_of(url, clock, fleet) as made:
        fleet.fails = "the cloud is full"
        for _ in range(24):  # two minutes
            await made.planner.round()
            clock.now_s += 5
        assert 2 <= fleet.num_calls <= 5
        assert "the cloud is full" in made.planner.status["roles"]["prefill"]["held"]
        fleet.fails = ""
        fleet.is_silent = True
        clock.now_s += 600
        num_calls = fleet.num_calls
        await made.planner.round()
        assert made.planner.status["state"] == "paused: it does not answer"
        assert fleet.num_calls == num_calls
        fleet.is_silent = False
        await made.planner.round()
        assert fleet.count("prefill") == 2


async def test_a_refusal_is_one_failure_however_many_nodes_are_wanted(
    url: str, clock: Clock, fleet: Fleet
) -> None:
    rules = replace(RULES, bounds={**RULES.bounds, "prefill": Bounds(5, 8, 0)})
    async with planner_of(url, clock, fleet, rules=rules) as made:
        fleet.fails = "the cloud is full"
        await made.planner.round()
        assert fleet.num_calls == 1
        await made.planner.round()
        assert "within 15 s" in made.planner.status["roles"]["prefill"]["held"]


async def test_a_listing_that_fails_counts_no_failure_a_second_time(
    url: str, clock: Clock, fleet: Fleet
) -> None:
    async with planner_of(url, clock, fleet) as made:
        for name in ("prefill-7", "prefill-8", "prefill-9"):
            fleet.nodes[name] = SuppliedNode(name, "prefill", FAILED, "has no weights")
        await made.planner.round()
        assert "has no weights" in made.planner.status["roles"]["prefill"]["held"]
        clock.now_s += 600
        await made.planner.round()
        assert fleet.count("prefill") == 2
        for is_silent in (True, False):
            fleet.is_silent = is_silent
            clock.now_s += 5
            await made.planner.round()
        assert made.planner.status["roles"]["prefill"]["held"] == ""


async def test_nodes_that_never_register_are_given_up_and_not_repeated_for_ever(
    url: str, clock: Clock, fleet: Fleet
) -> None:
    async with planner_of(url, clock, fleet) as made:
        fleet.joins = False
        asked: list[float] = []
        fleet.before_start = lambda: asked.append(clock.now_s)
        for _ in range(12 * 20):  # twenty minutes
            await made.planner.round()
            clock.now_s += 5
            for name, node in fleet.nodes.items():
                if node.state == STARTING:
                    fleet.nodes[name] = replace(node, age_s=node.age_s + 5)
        assert 3 <= len(asked) <= 8
        gaps = [after - before for before, after in pairwise(asked)]
        assert gaps == sorted(gaps)  # each pause is at least as long as the one before
        given_up = [node for node in fleet.nodes.values() if node.state == STOPPING]
        assert len(given_up) >= len(asked) - 1


async def test_newcomers_that_cannot_serve_are_given_up_and_not_repeated_for_ever(
    url: str, clock: Clock, fleet: Fleet
) -> None:
    async with planner_of(url, clock, fleet) as made:
        fleet.refuses = "its KV blocks are those of another engine.block_size"
        asked: list[str] = []
        fleet.before_start = lambda: asked.append(made.planner.status["roles"]["prefill"]["held"])
        for _ in range(12 * 20):  # twenty minutes
            await made.planner.round()
            clock.now_s += 5
        assert 3 <= len(asked) <= 20
        assert "engine.block_size" in made.planner.status["roles"]["prefill"]["held"]
        assert made.planner.status["roles"]["prefill"]["ready"] == 0


async def test_newcomers_that_the_conductor_cannot_reach_are_no_reason_for_ever_more(
    url: str, clock: Clock, fleet: Fleet
) -> None:
    async with planner_of(url, clock, fleet) as made:
        fleet.is_reached = False
        asked, held = list[float](), set[str]()
        fleet.before_start = lambda: asked.append(clock.now_s)
        for _ in range(12 * 60):  # an hour
            await made.planner.round()
            held.add(made.planner.status["roles"]["prefill"]["held"].rpartition(": ")[2])
            assert fleet.count("prefill") <= 6
            clock.now_s += 5
        gaps = [after - before for before, after in pairwise(asked)]
        assert gaps[0] >= 45.0 and gaps == sorted(gaps)
        assert "in the index, but out of reach for 30 s" in held
        assert "cannot be reached" in made.planner.status["roles"]["prefill"]["reason"]


async def test_a_node_that_is_out_of_reach_for_a_moment_is_not_replaced(
    url: str, clock: Clock, fleet: Fleet
) -> None:
    async with planner_of(url, clock, fleet) as made:
        await made.planner.round()
        num_calls = fleet.num_calls
        member = fleet.members["prefill-0"]
        for is_reached, num_rounds in ((False, 5), (True, 2), (False, 5), (True, 2)):
            member.available = lambda now_s, is_reached=is_reached: is_reached
            for _ in range(num_rounds):
                clock.now_s += 5
                await made.planner.round()
                assert made.planner.status["roles"]["prefill"]["held"] == ""
        assert fleet.num_calls == num_calls
        member.available = lambda now_s: False
        for _ in range(20):
            clock.now_s += 5
            await made.planner.round()
        assert fleet.num_calls == num_calls + 1, "for long, it is"


async def test_a_node_that_a_rollout_keeps_from_requests_is_not_out_of_reach(
    url: str, clock: Clock, fleet: Fleet
) -> None:
    async with planner_of(url, clock, fleet) as made:
        member = fleet.members[fleet.add("prefill")]
        member.gated, member.available = True, lambda now_s: False
        for _ in range(20):
            await made.planner.round()
            clock.now_s += 5
            assert made.planner.status["roles"]["prefill"]["held"] == ""


async def test_advice_changes_nothing_and_is_said_once(url: str, clock: Clock, fleet: Fleet) -> None:
    async with planner_of(url, clock, fleet, mode="advise") as made:
        for _ in range(3):
            await made.planner.round()
            clock.now_s += 5
        assert fleet.num_calls == 0
        assert [text.partition(":")[0] for _, _, text in made.said] == ["would add a prefill node"]


async def test_off_observes_and_holds_no_lease(url: str, clock: Clock, fleet: Fleet) -> None:
    async with planner_of(url, clock, fleet, mode="off") as off, planner_of(url, clock, fleet, "b") as made:
        await off.planner.round()
        assert off.planner.status["roles"]["prefill"]["ready"] == 1
        await made.planner.round()
        assert made.planner.status["state"] == "plans, epoch 1"
