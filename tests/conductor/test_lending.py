"""Nodes that go from one model to another: the decision, and the loop over two planners on a real Redis."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.conductor.fleet.administration import FleetAdmin
from moonpool.conductor.fleet.errors import ProviderFailed
from moonpool.conductor.fleet.providers.provider import REFUSED, RUNNING, SuppliedNode
from moonpool.conductor.fleet.registry import NodeRegistry
from moonpool.conductor.fleet.removal import Removable
from moonpool.conductor.observing import planner_metrics as metrics
from moonpool.conductor.observing.demand import DemandCounter
from moonpool.conductor.observing.slo import Slo
from moonpool.conductor.planning.arbiter import Arbiter, Borrower
from moonpool.conductor.planning.lease import PlannerLease
from moonpool.conductor.planning.lending import ModelState, OwnNode, lend
from moonpool.conductor.planning.on_demand import OnDemand
from moonpool.conductor.planning.plan import ADD, Bounds, Rules
from moonpool.conductor.planning.planner import Planner
from moonpool.kvstore.index.redis.client import connect
from moonpool.kvstore.index.redis.kv_index import KVIndex
from tests.conductor.test_planner import TTL_S, Clock, Fleet

STAGES = ("prefill", "decode")


def model(name: str, *roles: str, starved: str = "", lacks: str = "", **idle: int) -> ModelState:
    """``roles``: of its nodes, by the names of the stages that they serve."""
    nodes = [
        OwnNode(Removable(f"{name}-{number}"), STAGES if role == "both" else (role,))
        for number, role in enumerate(roles)
    ]
    lacking = {stage: "a test" for stage in (starved, lacks) if stage}
    return ModelState(name, lacking, {starved: "no room"} if starved else {}, idle, nodes)


def moves(*models: ModelState) -> list[tuple[str, str, str]]:
    return [(loan.node_id, loan.lender, loan.borrower) for loan in lend(models)]


def test_only_a_model_for_which_no_node_can_be_started_borrows_what_another_does_not_need() -> None:
    idle = model("b", "prefill", "prefill", prefill=1)
    assert moves(model("a", starved="prefill"), idle) == [("b-1", "b", "a")]
    assert moves(model("a", lacks="prefill"), idle) == []  # one is started
    assert moves(model("a", starved="prefill"), replace(idle, idle={"prefill": 0})) == []
    assert moves(model("a", starved="decode"), idle) == []
    (loan,) = lend([model("a", starved="prefill"), idle])
    assert loan.why == (
        "a lacks a prefill node (a test) and none can be started (no room); b did not need 1 of its own"
    )


def test_a_node_of_both_stages_goes_if_neither_is_needed() -> None:
    starved = model("a", starved="decode")
    assert moves(starved, model("b", "both", prefill=1, decode=1)) == [("b-0", "b", "a")]
    assert moves(starved, model("b", "both", decode=1)) == []


def test_a_model_that_lacks_nodes_itself_lends_none() -> None:
    assert moves(model("a", starved="prefill"), model("b", "prefill", prefill=1, lacks="decode")) == []


def test_the_model_with_the_most_idle_nodes_lends_the_one_that_is_missed_least() -> None:
    few, many = model("b", "prefill", prefill=1), model("c", *["prefill"] * 3, prefill=3)
    worn = [replace(own, node=replace(own.node, reused=9.0 - at)) for at, own in enumerate(many.nodes)]
    assert moves(model("a", starved="prefill"), few, replace(many, nodes=worn)) == [("c-2", "c", "a")]


def test_a_node_that_did_not_start_with_a_model_is_not_lent_to_it_again() -> None:
    starved = replace(model("a", starved="prefill"), refused={"b-1"})
    assert moves(starved, model("b", "prefill", "prefill", prefill=2)) == [("b-0", "b", "a")]


_MODELS = st.lists(
    st.tuples(
        st.lists(st.sampled_from(("prefill", "decode", "both")), max_size=4),
        st.sampled_from(("", *STAGES)),
        st.integers(0, 4),
        st.integers(0, 4),
    ),
    min_size=1,
    max_size=5,
)


@given(_MODELS)
def test_no_model_lends_more_than_it_has_idle_or_a_node_twice(
    drawn: list[tuple[list[str], str, int, int]],
) -> None:
    models = [
        model(f"m{number}", *roles, starved=starved, prefill=prefill, decode=decode)
        for number, (roles, starved, prefill, decode) in enumerate(drawn)
    ]
    loans = lend(models)
    assert len({loan.node_id for loan in loans}) == len(loans)
    assert len({loan.borrower for loan in loans}) == len(loans)
    for one in models:
        lent = [loan for loan in loans if loan.lender == one.name]
        for stage in STAGES:
            assert sum(stage in loan.stages for loan in lent) <= one.idle[stage]
        assert not lent or not one.lacks


# ---------------------------------------------------------------------- the loop

RULES = Rules(
    {"prefill": Bounds(1, 6, 0), "decode": Bounds(1, 6, 0)}, hold_s=300.0, lend_s=20.0, cooldown_s=20.0
)


class Half(Fleet):
    """The nodes of one of two models on a machine without room for another one."""

    def __init__(self, clock: Clock, label: str) -> None:
        self.label = label
        self.other: Half | None = None
        self.spoilt = False  # its nodes do not start with the other model
        super().__init__(clock)

    def add(self, role: str) -> str:
        name = f"{role}-{self.label}-{len(self.nodes)}"
        self.take(SuppliedNode(name, role, RUNNING))
        return name

    def lose(self, node_id: str) -> SuppliedNode:
        node = self.nodes.pop(node_id)
        self._tables[node.role].remove(self.members.pop(node_id).view)
        return node

    def take(self, node: SuppliedNode) -> None:
        self.nodes[node.node_id] = node
        self.join(node.node_id)

    async def start(self, role: str, model: str, fence: int = 0) -> str:
        raise ProviderFailed("this machine has no room")

    async def switch(self, node_id: str, role: str, model: str, fence: int = 0) -> None:
        self._called(fence)
        assert self.other is not None and self.other.label == model
        if self.spoilt:
            self.other.nodes[node_id] = SuppliedNode(node_id, role, REFUSED, "it did not start")
            return
        self.other.take(self.lose(node_id))


@dataclass
class Side:
    fleet: Half
    planner: Planner
    demand: DemandCounter
    rate: int = 0  # requests of 0.2 s of computation that arrive in a second

    @property
    def num_nodes(self) -> int:
        return self.fleet.count("prefill")


@dataclass
class Pair:
    a: Side
    b: Side
    arbiter: Arbiter
    lease: PlannerLease
    clock: Clock
    said: list[str]

    async def run(self, seconds: int) -> list[tuple[float, int]]:
        """Returns when how many nodes were the first model's, at each change."""
        seen = [(self.clock.now_s, self.a.num_nodes)]
        for _ in range(seconds // 5):
            self.clock.now_s += 5
            for side in (self.a, self.b):
                for _ in range(5 * side.rate):
                    side.demand.arrived(0.2, 100, 0)
                await side.planner.round()
            await self.arbiter.round()
            if self.a.num_nodes != seen[-1][1]:
                seen.append((self.clock.now_s, self.a.num_nodes))
        return seen


@asynccontextmanager
async def two(url: str, *, mode: str = "act", nodes: int = 4, rules: Rules = RULES) -> AsyncIterator[Pair]:
    clock, client, said = Clock(), connect(url), list[str]()
    halves = [Half(clock, label) for label in "ab"]
    lease = PlannerLease(
        KVIndex(client, halves[0].namespace, timeout_s=30.0), "conductor", ttl_s=TTL_S, clock=clock
    )
    sides, borrowers = [], []
    for half, other in zip(halves, reversed(halves), strict=True):
        half.other = other
        demand = DemandCounter()
        registry = cast(NodeRegistry, half)
        admin = FleetAdmin(registry, half, half.label, clock, lambda *change: None)
        planner = Planner(
            registry,
            admin,
            lease,
            lambda demand=demand: demand.total,  # type: ignore[misc]
            mode=mode,
            rules=replace(rules, can=frozenset({ADD})),
            slo=Slo(ttft_s=1.0, tbt_s=0.1),
            clock=clock,
            on_decision=lambda *event: None,
        )
        sides.append(Side(half, planner, demand))
        borrowers.append(Borrower(half.label, planner, admin, registry, lambda: 1))
    for _ in range(nodes - 1):
        halves[1].add("prefill")

    def decided(kind: str, node: str, text: str) -> None:
        said.append(text)

    arbiter = Arbiter(borrowers, lease, clock=clock, on_decision=decided)
    try:
        yield Pair(*sides, arbiter, lease, clock, said)
    finally:
        await client.aclose()


def stranded_s(label: str) -> float:
    return metrics.stranded.labels(label)._value.get()


async def test_a_model_that_sleeps_borrows_the_nodes_that_cannot_be_started(url: str) -> None:
    """Its first request wants one of each role, and the machine has no room."""
    async with two(url) as pair:
        sleeper, registry = pair.a.fleet, cast(NodeRegistry, pair.a.fleet)
        for name in list(sleeper.nodes):
            sleeper.lose(name)
        pair.b.fleet.add("decode")
        admin = FleetAdmin(registry, sleeper, "a", pair.clock, lambda *change: None)
        nodes = OnDemand(
            registry,
            admin,
            pair.lease,
            roles=STAGES,
            min_warm=0,
            idle_s=300.0,
            activity=lambda: (0, 1),
            clock=pair.clock,
        )
        pair.a.planner._stands_back = lambda: nodes.decides
        for _ in range(60):
            nodes.ask()
            await nodes.round()
            await pair.run(5)
        assert (sleeper.count("prefill"), sleeper.count("decode")) == (1, 1)
        assert sorted(text.split("-")[0] for text in pair.said) == ["lend decode", "lend prefill"]


async def test_a_model_that_lacks_nodes_gets_the_idle_ones_of_another_down_to_its_floor(url: str) -> None:
    before_s = stranded_s("b")
    async with two(url) as pair:
        pair.a.rate = 25  # five nodes compute
        seen = await pair.run(120)
        assert (pair.a.num_nodes, pair.b.num_nodes) == (4, 1)
        assert seen[1][0] - seen[0][0] >= RULES.lend_s, "it was not needed for so long"
        assert all(text.startswith("lend prefill-b-") and " to a: a lacks" in text for text in pair.said)
        assert len(pair.said) == 3
        assert set(pair.b.fleet.fences) == {1}, "the epoch of the planners' lease"
        # While a queued, b had nodes without a request.
        assert stranded_s("b") - before_s >= 3 * RULES.lend_s
        assert pair.arbiter.status["a"]["queues"] and not pair.arbiter.status["b"]["queues"]
        assert pair.arbiter.status["b"]["stranded_node_s"] == pytest.approx(stranded_s("b") - before_s)
        assert pair.arbiter.status["a"]["loan"] == pair.said[-1]
        needed = [metrics.needed.labels(label, "prefill")._value.get() for label in ("a", "b")]
        assert needed == [side.planner.status["roles"]["prefill"]["needed"] for side in (pair.a, pair.b)]
        assert needed[0] > needed[1], "each model's own"


async def waves(url: str, rules: Rules, seconds: int) -> tuple[list[int], float]:
    """The load goes from one model to the other and back, three times. Returns how many nodes the first one
    had after each change, and the shortest time between two changes of direction."""
    async with two(url, rules=rules) as pair:
        changes = []
        for rate_a, rate_b in ((25, 0), (0, 25)) * 3:
            pair.a.rate, pair.b.rate = rate_a, rate_b
            changes += (await pair.run(seconds))[1:]
    ways = [(at_s, after - before) for (_, before), (at_s, after) in pairwise([(0.0, 1), *changes])]
    turns = [at_s - before_s for (before_s, before), (at_s, way) in pairwise(ways) if way != before]
    return [count for _, count in changes], min(turns)


async def test_nodes_come_back_when_the_load_does(url: str) -> None:
    counts, turn_s = await waves(url, RULES, 400)
    assert max(counts) == 4 and counts.count(1) == 3, "it lends and gets back, three times"
    assert turn_s >= RULES.cooldown_s


async def test_no_node_goes_to_and_fro_within_the_cool_down(url: str) -> None:
    _, turn_s = await waves(url, replace(RULES, cooldown_s=250.0), 200)
    assert turn_s >= 250


async def test_advice_is_given_once_and_changes_nothing(url: str) -> None:
    async with two(url, mode="advise") as pair:
        pair.a.rate = 25
        await pair.run(120)
        assert (pair.a.num_nodes, pair.b.num_nodes, pair.b.fleet.num_calls) == (1, 4, 0)
        (text,) = pair.said
        assert text.startswith("would lend prefill-b-4 to a: ")
        shown = pair.arbiter.status["a"], pair.a.planner.status
        assert [status["loan"] for status in shown] == [text, text]
        pair.a.rate = 0
        await pair.run(300)
        assert not any("loan" in status for status in shown), "a lacks no node any more"


async def test_without_planners_nothing_is_lent_and_what_is_stranded_is_counted(url: str) -> None:
    before_s = stranded_s("b")
    async with two(url, mode="off") as pair:
        pair.a.rate = 25
        await pair.run(60)
        assert (pair.said, pair.b.fleet.num_calls) == ([], 0)
        assert stranded_s("b") > before_s
        pair.a.rate = 0
        await pair.run(300)
        before_s = stranded_s("b")
        await pair.run(60)
        assert stranded_s("b") == before_s, "no model lacks nodes"


async def test_a_loan_that_fails_is_not_asked_for_again_at_once(url: str) -> None:
    async with two(url) as pair:
        pair.a.rate = 25
        pair.b.fleet.fails = "the supervisor is away"
        await pair.run(60)
        assert pair.a.num_nodes == 1
        assert 1 <= pair.b.fleet.num_calls <= 3
        pair.b.fleet.fails = ""
        await pair.run(60)
        assert pair.a.num_nodes > 1


async def test_a_node_that_does_not_start_with_the_other_model_is_lent_no_more(url: str) -> None:
    async with two(url, nodes=2) as pair:
        pair.a.rate = 25
        pair.b.fleet.spoilt = True
        await pair.run(300)
        assert (pair.a.num_nodes, pair.b.num_nodes) == (1, 2)
        # One node after the other was tried, each once.
        assert 1 <= pair.b.fleet.num_calls <= 2
        assert len({text.split()[1] for text in pair.said}) == len(pair.said)
