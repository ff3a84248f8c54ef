"""The planner's pure functions: how many nodes a load needs, and what is changed for it."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.conductor.fleet.providers.provider import FAILED, RUNNING, STARTING, SuppliedNode
from moonpool.conductor.fleet.removal import Removable
from moonpool.conductor.observing.demand import ClusterDemand, Demand, DemandCounter
from moonpool.conductor.observing.slo import Slo
from moonpool.conductor.planning.loads import (
    DecodeLoad,
    Need,
    PrefillLoad,
    decode_need,
    prefill_need,
    queue_need,
)
from moonpool.conductor.planning.plan import (
    ADD,
    REMOVE,
    SWITCH,
    Bounds,
    Memory,
    Plan,
    RoleState,
    Rules,
    plan,
)
from moonpool.conductor.planning.supply import Supply
from moonpool.conductor.planning.window import DemandWindow

BOUNDS = {"prefill": Bounds(1, 16, 1), "decode": Bounds(1, 16, 1)}
SWITCHING = frozenset({ADD, REMOVE, SWITCH})
RULES = Rules(BOUNDS, hold_s=300.0, cooldown_s=60.0, steps=4)


def state(role: str, ready: int, need: int, **more: object) -> RoleState:
    nodes = [Removable(f"{role}-{number}") for number in range(ready)]
    made = RoleState(nodes, 0, Need(need, "a test"), switchable=nodes)
    return replace(made, **more)  # type: ignore[arg-type]


def both(ready: tuple[int, int], needs: tuple[int, int], **more: object) -> Mapping[str, RoleState]:
    names = ("prefill", "decode")
    return {name: state(name, *pair, **more) for name, *pair in zip(names, ready, needs, strict=True)}


def run(
    needs: list[tuple[float, int]], ready: int = 2, rules: Rules = RULES, **more: object
) -> list[tuple[float, str, int]]:
    """Plan for prefill alone at each time, and make the steps at once. Returns (time, kind, count)."""
    memory, changes = Memory(), []
    for now_s, need in needs:
        decided, memory = plan(both((ready, 2), (need, 1), **more), rules, memory, now_s)
        for kind, sign in ((ADD, 1), (REMOVE, -1)):
            count = sum(step.kind == kind and step.role == "prefill" for step in decided.steps)
            if count:
                changes.append((now_s, kind, count))
                ready += sign * count
    return changes


def test_what_the_load_needs_is_added_at_once_with_one_to_spare_and_at_most_k_at_a_time() -> None:
    assert run([(0, 3)]) == [(0, ADD, 2)]
    assert run([(0, 12), (5, 12), (10, 12), (15, 12)]) == [(0, ADD, 4), (5, ADD, 4), (10, ADD, 3)]


def test_nodes_that_start_are_not_asked_for_again() -> None:
    decided, _ = plan(both((2, 2), (5, 1), num_starting=4), RULES, Memory(), 0.0)
    assert not [step for step in decided.steps if step.role == "prefill"]


def test_floors_and_ceilings_hold() -> None:
    rules = replace(RULES, bounds=BOUNDS | {"prefill": Bounds(3, 5, 1)}, steps=99)
    assert run([(0, 100)], rules=rules) == [(0, ADD, 3)]
    quiet = [(float(at), 1) for at in range(0, 2000, 5)]
    assert sum(count for _, kind, count in run(quiet, ready=5, rules=rules) if kind == REMOVE) == 2


def test_a_node_is_removed_only_when_it_was_not_needed_for_the_whole_hold() -> None:
    rises = [(0.0, 5), *((float(at), 1) for at in range(5, 1000, 5))]
    changes = run(rises, ready=6)
    assert changes[0][0] > 300
    assert {kind for _, kind, _ in changes} == {REMOVE}
    # A need that comes back within the hold keeps the nodes: nothing flaps.
    waves = [(float(at), 5 if at % 200 < 50 else 1) for at in range(0, 3600, 5)]
    assert run(waves, ready=6) == []


@given(st.lists(st.integers(1, 20), min_size=1, max_size=300), st.integers(1, 16))
def test_no_role_is_removed_from_within_the_cool_down_of_a_change(needs: list[int], ready: int) -> None:
    changes = run([(5.0 * i, need) for i, need in enumerate(needs)], ready)
    for (before_s, _, _), (now_s, kind, _) in pairwise(changes):
        assert kind == ADD or now_s - before_s >= RULES.cooldown_s
    assert all(now_s >= RULES.hold_s for now_s, kind, _ in changes if kind == REMOVE)


def test_too_little_attainment_adds_though_the_load_seems_small() -> None:
    roles = both((4, 4), (2, 2), attained=0.7)
    decided, memory = plan(roles, RULES, Memory(), 0.0)
    assert {(step.kind, step.role) for step in decided.steps} == {(ADD, "prefill"), (ADD, "decode")}
    assert "70% of requests keep the SLO" in decided.reasons["prefill"]
    again, _ = plan(both((6, 6), (2, 2), attained=0.7), RULES, memory, 30.0)
    assert again.steps == []  # what was added has not been measured yet


def test_a_role_that_lacks_nodes_takes_those_that_another_has_too_many_of() -> None:
    rules = replace(RULES, can=SWITCHING, hold_s=10.0, lend_s=10.0, cooldown_s=0.0)
    decided, memory = Plan(), Memory()
    for now_s in (0.0, 5.0, 11.0):
        decided, memory = plan(both((2, 6), (4, 1)), rules, memory, now_s)
    kinds = [(step.kind, step.role, step.to_role) for step in decided.steps]
    assert kinds == [(SWITCH, "decode", "prefill")] * 3 + [(REMOVE, "decode", "")]
    without, _ = plan(both((2, 6), (4, 1)), replace(rules, can=RULES.can), memory, 11.0)
    # At most four steps: the other removals wait.
    assert [step.kind for step in without.steps] == [ADD, ADD, ADD, REMOVE]


def test_a_fleet_of_fixed_size_switches_what_can_be_switched_and_nothing_else() -> None:
    """Without a provider nothing is added or removed."""
    rules = replace(RULES, can=frozenset({SWITCH}), lend_s=10.0, cooldown_s=0.0)
    able = [Removable("decode-1", reused=5), Removable("decode-4", reused=1)]
    roles = {
        "prefill": RoleState((), 0, Need(9, ""), num_fixed=2),
        "decode": RoleState((), 0, Need(1, ""), num_fixed=5, switchable=able),
    }
    _, memory = plan(roles, rules, Memory(), 0.0)
    decided, _ = plan(roles, rules, memory, 10.0)
    assert [(step.kind, step.node_id) for step in decided.steps] == [
        (SWITCH, "decode-4"),
        (SWITCH, "decode-1"),
    ]


@pytest.mark.slow
@given(st.lists(st.tuples(st.integers(1, 12), st.integers(1, 12)), min_size=20, max_size=300))
def test_roles_do_not_flap(needs: list[tuple[int, int]]) -> None:
    """A role that took nodes, or gave some, gives none within the cool-down, whatever the load does."""
    rules = replace(RULES, can=frozenset({SWITCH}))
    ready, memory = [6, 6], Memory()
    changed_s = dict.fromkeys(("prefill", "decode"), -math.inf)
    for i, need in enumerate(needs):
        now_s = 5.0 * i
        decided, memory = plan(both((ready[0], ready[1]), need), rules, memory, now_s)
        for step in decided.steps:
            assert step.kind == SWITCH
            assert now_s - changed_s[step.role] >= rules.cooldown_s
            to = ("prefill", "decode").index(step.to_role)
            ready[to], ready[1 - to] = ready[to] + 1, ready[1 - to] - 1
        changed_s |= {name: now_s for step in decided.steps for name in (step.role, step.to_role)}
        assert sum(ready) == 12
        assert min(ready) >= 2  # the floor, and one to spare


def test_the_node_whose_blocks_are_used_least_goes() -> None:
    rules = replace(RULES, hold_s=1.0, cooldown_s=0.0)
    nodes = [
        Removable("decode-0", reused=9),
        Removable("decode-1", reused=2),
        Removable("decode-2", reused=5),
    ]
    roles = both((2, 2), (1, 1)) | {"decode": RoleState(nodes, 0, Need(1, ""))}
    _, memory = plan(roles, rules, Memory(), 0.0)
    decided, _ = plan(roles, rules, memory, 2.0)
    assert [step.node_id for step in decided.steps] == ["decode-1"]


def test_while_a_provider_fails_nothing_is_asked_for() -> None:
    decided, _ = plan(both((1, 1), (5, 5), held="it is away"), RULES, Memory(), 0.0)
    assert decided.steps == []
    assert decided.targets == {"prefill": 6, "decode": 6}


# ---------------------------------------------------------------------- needs


@given(
    rate=st.floats(0, 500),
    compute_s=st.floats(1e-3, 20),
    variation=st.floats(0, 4),
    ttft_s=st.floats(0.1, 60),
    more=st.floats(1, 3),
)
def test_more_load_never_needs_fewer_nodes(
    rate: float, compute_s: float, variation: float, ttft_s: float, more: float
) -> None:
    load, slo = PrefillLoad(rate, compute_s, variation, mean_per_s=rate), Slo(ttft_s=ttft_s)
    need = prefill_need(load, slo, attained=0.95, join_s=10.0, ready=2).nodes
    assert need >= max(1, rate * compute_s)
    for heavier in (
        replace(load, requests_per_s=rate * more, mean_per_s=rate * more),
        replace(load, queued_s=more * 10),
    ):
        assert prefill_need(heavier, slo, attained=0.95, join_s=10.0, ready=2).nodes >= need


@given(
    rate=st.floats(0, 500),
    compute_s=st.floats(1e-3, 20),
    variation=st.floats(0, 4),
    ttft_s=st.floats(0.1, 60),
    target=st.floats(0.5, 0.999),
    part=st.floats(0.1, 1),
)
def test_a_stricter_goal_never_needs_fewer_nodes(
    rate: float, compute_s: float, variation: float, ttft_s: float, target: float, part: float
) -> None:
    """A shorter SLO, and more requests that should keep it."""
    load = PrefillLoad(rate, compute_s, variation, mean_per_s=rate)

    def need(ttft_s: float, attained: float) -> int:
        return prefill_need(load, Slo(ttft_s=ttft_s), attained=attained, join_s=10.0, ready=2).nodes

    assert need(ttft_s, 1 - (1 - target) * part) >= need(ttft_s, target)
    # Where a prompt alone takes longer than the SLO, more nodes do not help.
    assert part * ttft_s <= compute_s or need(part * ttft_s, target) >= need(ttft_s, target)


@pytest.mark.parametrize(
    ("slo_s", "attained", "most"),
    [(1.5, 0.8, 13), (1.5, 0.95, 14), (1.5, 0.99, 16), (0.8, 0.95, 16), (4.0, 0.95, 13), (4.0, 0.99, 13)],
)
def test_the_need_keeps_the_slo_in_a_queue(slo_s: float, attained: float, most: int) -> None:
    """Simulated: Poisson arrivals, exponential work, first come first served, on as many nodes."""
    rng, rate, compute_s = random.Random(1), 20.0, 0.5
    need = prefill_need(
        PrefillLoad(rate, compute_s, 1.0), Slo(ttft_s=slo_s), attained=attained, join_s=10.0, ready=2
    ).nodes
    free_s, now_s, late, num_requests = [0.0] * need, 0.0, 0, 40_000
    for _ in range(num_requests):
        now_s += rng.expovariate(rate)
        first = min(range(need), key=free_s.__getitem__)
        waited_s = max(free_s[first] - now_s, 0.0)
        free_s[first] = now_s + waited_s + rng.expovariate(1 / compute_s)
        late += waited_s > slo_s - compute_s
    assert late / num_requests < 1 - attained
    assert need <= most  # 10 compute on average


def test_work_that_waits_is_done_in_time_by_nodes_that_have_yet_to_join() -> None:
    slo = Slo(ttft_s=31.0)  # 0.7 × 30 s may be waited for
    load = PrefillLoad(2.0, 1.0, 1.0, queued_s=160.0)
    assert queue_need(load, slo, join_s=10.0, ready=5) == pytest.approx((160 - 50) / 11)
    # All that 20 more nodes' worth brings until they serve waits too: 160 + 15 × 10 s.
    burst = replace(load, latest_nodes=20.0)
    assert queue_need(burst, slo, join_s=10.0, ready=5) == pytest.approx(310 / 21)
    assert queue_need(load, slo, join_s=10.0, ready=99) == pytest.approx(160 / 21)
    assert queue_need(load, slo, join_s=60.0, ready=5) == pytest.approx(160 / 60)  # late by then
    assert queue_need(load, Slo(), join_s=2.0, ready=5) == 16.0
    assert prefill_need(burst, slo, attained=0.95, join_s=10.0, ready=5).nodes == 15


def test_where_requests_can_wait_for_nodes_to_join_a_burst_needs_them_for_its_work_alone() -> None:
    load = PrefillLoad(40.0, 1.0, 1.0, queued_s=40.0, mean_per_s=5.0, latest_nodes=40.0)
    patient = prefill_need(load, Slo(ttft_s=61.0), attained=0.95, join_s=10.0, ready=10).nodes
    hurried = prefill_need(load, Slo(ttft_s=3.0), attained=0.95, join_s=10.0, ready=10).nodes
    assert patient < 15 < 40 <= hurried


def test_decode_nodes_keep_the_step_and_the_pool() -> None:
    slo = Slo(tbt_s=0.1)
    assert decode_need(DecodeLoad(0.02, 0.30, 0, 0), slo).nodes == 5  # 0.30 / (0.08 - 0.02)
    assert decode_need(DecodeLoad(0.02, 0.0, 9000, 1000), slo).nodes == 12
    assert decode_need(DecodeLoad(0.02, 9.0, 10, 1000), Slo()).nodes == 1
    assert decode_need(DecodeLoad(0.2, 9.0, 10, 1000), slo).nodes == 1  # no number of nodes would keep it
    assert decode_need(DecodeLoad(0.02, 0.30, 0, 0).grown(2), slo).nodes == 10


# ---------------------------------------------------------------------- demand


def totals(rates: list[float], compute_s: float = 0.5) -> DemandWindow:
    """Read every 5 s, while requests arrive at these rates."""
    window, counter, now_s = DemandWindow(), DemandCounter(), 0.0
    window.add(now_s, counter.total)
    for rate in rates:
        for _ in range(round(rate * 5)):
            counter.arrived(compute_s, 1000, 250)
            counter.first_token(True)
            counter.ended(8, False)
        now_s += 5
        window.add(now_s, counter.total)
    return window


def test_a_steady_demand_is_no_trend() -> None:
    recent = totals([10.0] * 30).recent(join_s=60.0)
    assert recent.requests_per_s == pytest.approx(10.0)
    assert recent.growth == 1.0
    assert (recent.compute_s, recent.variation) == (pytest.approx(0.5), pytest.approx(0.0, abs=1e-6))
    assert (recent.hit_ratio, recent.ttft_attained, recent.tbt_attained) == (0.25, 1.0, 0.0)


def test_a_rise_is_expected_to_go_on_while_a_node_joins() -> None:
    rising = totals([5.0] * 18 + [20.0] * 6)
    soon, late = rising.recent(join_s=10.0), rising.recent(join_s=60.0)
    assert 1.0 < soon.growth < late.growth <= 2.0
    assert soon.requests_per_s == pytest.approx(20.0)
    falling = totals([20.0] * 18 + [5.0] * 6).recent(join_s=60.0)
    assert falling.growth == 1.0
    assert falling.requests_per_s > 15.0  # what was a minute ago may come back


def test_bursts_that_come_and_go_are_no_trend() -> None:
    """As requests of a production service do: many at once, then none."""
    bursts = totals(([40.0] + [0.0] * 5) * 6)
    assert bursts.recent(join_s=60.0).growth == 1.0
    assert bursts.recent(join_s=60.0).requests_per_s == pytest.approx(40 / 6, rel=0.2)


def test_few_requests_say_nothing_of_attainment() -> None:
    assert totals([0.2] * 12).recent(30.0).ttft_attained is None
    assert DemandWindow().recent(30.0).requests_per_s == 0.0


def test_what_other_conductors_had_before_they_were_heard_is_not_counted() -> None:
    own = DemandCounter()
    demand = ClusterDemand(own)
    demand.hear("b", Demand(num_requests=100))
    before = demand.total
    own.arrived(1.0, 10, 0)
    demand.hear("b", Demand(num_requests=103))
    demand.forget("b")
    demand.hear("b", Demand(num_requests=500))
    assert demand.total.minus(before).num_requests == 4


# ---------------------------------------------------------------------- supply


def test_a_node_that_never_registers_is_given_up_once_and_the_next_waits_longer() -> None:
    supply, now_s = Supply(), 0.0
    pauses = []
    for number in range(3):
        node = SuppliedNode(f"decode-{number}", "decode", STARTING, age_s=0.0)
        assert supply.look([node], (), 5.0, now_s) == ([node.node_id], {})
        now_s += 121.0
        old = replace(node, state=RUNNING, age_s=121.0)
        why = "it has not registered 121 s after its start"
        assert supply.look([old], (), 5.0, now_s) == ([], {node.node_id: why})
        assert supply.look([old], (), 5.0, now_s) == ([], {})
        assert "has not registered" in supply.held(now_s)
        pauses.append(supply.held_until_s - now_s)
        now_s = supply.held_until_s
        assert supply.held(now_s) == ""
    assert pauses == [15.0, 30.0, 60.0]
    joined = SuppliedNode("decode-9", "decode", RUNNING)
    supply.look([joined], {"decode-9"}, 5.0, now_s)
    assert supply.num_failures == 0


def test_nodes_that_fail_together_are_one_failure() -> None:
    supply = Supply()
    nodes = [SuppliedNode(f"decode-{i}", "decode", RUNNING) for i in range(6)]
    refused = {node.node_id: "it has another dtype" for node in nodes}
    assert len(supply.look(nodes[:5], refused, 5.0, 0.0, refused)[1]) == 5
    assert (supply.num_failures, supply.held_until_s) == (1, 15.0)
    # It was asked for before the pause, too.
    assert len(supply.look(nodes, refused, 5.0, 10.0, refused)[1]) == 1
    assert (supply.num_failures, supply.held_until_s) == (1, 15.0)
    last = SuppliedNode("decode-6", "decode", FAILED, "ended with code 1")
    supply.look([*nodes, last], refused, 5.0, 20.0, refused)
    assert (supply.num_failures, supply.held_until_s) == (2, 50.0)


def test_a_node_that_cannot_be_stopped_holds_up_no_other() -> None:
    supply, node = Supply(), SuppliedNode("decode-0", "decode", RUNNING)
    refused, now_s, tries = {"decode-0": "it has another dtype"}, 0.0, []
    while now_s < 60.0:
        _, gives_up = supply.look([node], refused, 5.0, now_s, refused)
        for node_id, why in gives_up.items():
            tries.append(now_s)
            supply.still_runs(node_id, why, now_s)
        now_s += 1.0
    assert tries == [float(5 * i) for i in range(12)]
    assert (supply.num_failures, supply.held_until_s) == (1, 15.0)
    # It serves after all, and then leaves as others do.
    assert supply.look([node], ["decode-0"], 5.0, 60.0) == ([], {})
    assert supply.look([node], [], 5.0, 61.0) == (["decode-0"], {})


def test_failures_are_counted_once_each_and_the_pause_is_bounded() -> None:
    supply = Supply()
    dead = [SuppliedNode(f"decode-{i}", "decode", FAILED, "ended with code 1") for i in range(20)]
    for count in range(1, 21):
        now_s = supply.held_until_s
        supply.look(dead[:count], (), 5.0, now_s)
        pause_s = supply.held_until_s - now_s
        supply.look(dead[:count], (), 5.0, supply.held_until_s)
        assert (supply.num_failures, supply.held_until_s) == (count, now_s + pause_s)
    assert pause_s == 600.0


def test_who_plans_next_does_not_give_up_a_node_that_starts_again() -> None:
    old = SuppliedNode("decode-0", "decode", RUNNING, age_s=5000.0)
    assert Supply().look([old], (), 5.0, 0.0) == (["decode-0"], {})


def test_a_newcomer_that_cannot_serve_is_given_up_with_the_reason() -> None:
    supply, node = Supply(), SuppliedNode("decode-0", "decode", RUNNING)
    refused = {"decode-0": "it has another dtype"}
    gives_up = {"decode-0": "it cannot serve here: it has another dtype"}
    assert supply.look([node], {"decode-0"}, 5.0, 0.0, refused) == ([], gives_up)
    assert "another dtype" in supply.held(1.0)
    assert supply.look([node], {"decode-0"}, 5.0, 5.0, refused) == ([], {})


def test_a_node_that_comes_and_goes_is_waited_for_and_then_given_up() -> None:
    supply, node, told = Supply(), SuppliedNode("decode-0", "decode", RUNNING), []
    for i in range(12):  # there for a round, away for two
        joined = {"decode-0"} if i % 3 == 0 else set()
        expected, gives_up = supply.look([node], joined, 10.0, 5.0 * i)
        told += gives_up.values()
        assert bool(expected) == (not joined and not told)
    assert told == ["it left the index 3 times"]
    gone = Supply()
    gone.look([node], {"decode-0"}, 10.0, 0.0)
    assert gone.look([node], (), 10.0, 5.0)[0] == ["decode-0"]
    assert gone.look([node], (), 10.0, 26.0)[0] == []  # another one is needed


def test_departures_that_are_days_apart_are_no_reason_to_give_a_node_up() -> None:
    supply, node = Supply(), SuppliedNode("decode-0", "decode", RUNNING)
    for day in range(5):
        now_s = 86_400.0 * day
        supply.look([node], {"decode-0"}, 10.0, now_s)
        assert supply.look([node], (), 10.0, now_s + 2.0) == (["decode-0"], {})


def test_short_losses_of_contact_do_not_add_up() -> None:
    supply, node = Supply(), SuppliedNode("decode-0", "decode", RUNNING)
    for day in range(8):
        began_s = 86_400.0 * day
        supply.look([node], {"decode-0"}, 10.0, began_s)
        for i in range(21):
            supply.look([node], {"decode-0"}, 10.0, began_s + 2.0 * i, unreached={"decode-0"})
        assert supply.lost == {"decode-0"}
        supply.look([node], {"decode-0"}, 10.0, began_s + 42.0)
        assert not supply.lost
        assert 0.0 < supply.held_until_s - began_s <= 48.0, "each is the first in a row"


def test_nodes_that_cannot_be_reached_bound_switches_too() -> None:
    bounds = {"prefill": Bounds(1, 6, 0), "decode": Bounds(1, 6, 0)}
    rules = replace(RULES, bounds=bounds, can=SWITCHING, lend_s=10.0)
    roles = {"prefill": state("prefill", 2, 1), "decode": state("decode", 3, 6, num_lost=1)}
    _, memory = plan(roles, rules, Memory(), 0.0)
    decided, _ = plan(roles, rules, memory, 10.0)
    kinds = [step.kind for step in decided.steps if "decode" in (step.to_role, step.role)]
    assert kinds == [SWITCH, ADD], "with the one that cannot be reached, six"


def test_a_node_that_dies_after_each_long_start_is_given_up() -> None:
    supply, node, told = Supply(), SuppliedNode("decode-0", "decode", RUNNING), []
    for i in range(3):  # it joins for ten minutes, and serves for one
        supply.look([node], {"decode-0"}, 600.0, 660.0 * i)
        told += supply.look([node], (), 600.0, 660.0 * i + 60.0)[1].values()
    assert told == ["it left the index 3 times"]
