"""Requests that leave their node in the simulated cluster."""

from __future__ import annotations

import random
from dataclasses import replace
from statistics import mean

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonpool.conductor.costs.model import Profile
from moonpool.conductor.observing.slo import Slo
from moonpool.conductor.planning.plan import ADD, REMOVE, SWITCH, Bounds, Rules
from moonpool.simulator.inputs.scenario import ClusterEvent, Elastic, Role, Scenario
from moonpool.simulator.inputs.trace import TraceRequest
from moonpool.simulator.simulation import Simulation
from tests.simulator.test_simulation import A800, SMALL, chat, one, run

ALL = ("drain", "defragment", "hot-spot", "priority", "queue")


# Each sequence makes its steps about 2 ms longer.
STEEP = replace(SMALL, profile=Profile(0.01, 1e-4, 1e-9, 0.005, 1e-3, 1e-6))


def long_answers(seed: int, gap_s: float = 0.15) -> list[TraceRequest]:
    """Prompts alike, and answers from short to very long, which no prompt tells."""
    rng = random.Random(seed)
    lengths = [round(rng.paretovariate(1.1) * 60) % 1500 + 2 for _ in range(160)]
    return [one(700, length, gap_s * i, 10**6 + 2 * i) for i, length in enumerate(lengths)]


def waves(seed: int) -> list[TraceRequest]:
    """Many at once, of which some answer at length: how many of those a node gets is chance."""
    rng = random.Random(seed)
    return [one(700, rng.choice((8, 900)), 60.0 * (i // 24), 10**6 + 2 * i) for i in range(144)]


def test_a_node_that_joins_takes_over_prompts_that_wait() -> None:
    requests = [one(20_000, at_s=0.01 * i, first_id=40 * i) for i in range(12)]
    scenario = Scenario(A800, num_prefill=1, num_decode=1, events=(ClusterEvent(5.0, "join", "prefill"),))
    _, stays = run(scenario, requests)
    simulation, moves = run(replace(scenario, migrate=("queue",)), requests)
    assert simulation.moves.num_replaced > 0
    last_s, before_s = (max(each.ttft_s for each in outcome.served) for outcome in (moves, stays))
    assert last_s < 0.7 * before_s
    for outcome in (stays, moves):
        assert sum(outcome.hit_tokens.values()) == sum(request.input_tokens for request in requests)


def test_where_answers_differ_moves_end_the_slowest_ones_sooner() -> None:
    scenario = Scenario(STEEP, num_prefill=2, num_decode=3, slo=Slo(10.0, 0.0145))
    _, stays = run(scenario, waves(4))
    simulation, moves = run(replace(scenario, migrate=ALL), waves(4))
    assert simulation.moves.num_moved > 0
    last_s, before_s = (max(each.e2e_s for each in outcome.served) for outcome in (moves, stays))
    assert last_s < 0.9 * before_s
    mean_s, mean_before_s = (mean(each.tbt_s for each in outcome.served) for outcome in (moves, stays))
    assert mean_s < mean_before_s


def test_a_request_stands_still_only_for_the_tokens_since_its_move_began() -> None:
    """It has produced some 700 tokens of a kilobyte each, and the link carries a thousand a second."""
    slow = replace(SMALL, network_nbytes_per_s=1e6)
    scenario = Scenario(slow, num_prefill=1, num_decode=2, migrate=("drain",), block_tokens=16)
    simulation = Simulation(scenario, [TraceRequest(0.0, 600, 1000, tuple(range(38)))])
    (job,) = simulation.jobs

    def drain() -> None:
        (node,) = (node for node in simulation.nodes.values() if job in node.jobs)
        simulation.cluster.retire(node)

    simulation.clock.at(15.0, drain)
    simulation.run()
    assert simulation.moves.num_moved == 1
    gaps_s = np.concatenate(job.gaps_s)[1:]  # without that of its hand-over
    assert gaps_s.max() < 0.2


def test_a_node_that_its_requests_have_left_counts_no_token_of_theirs() -> None:
    scenario = Scenario(SMALL, num_prefill=1, num_decode=2, migrate=("drain",), block_tokens=16)
    simulation = Simulation(scenario, [TraceRequest(0.0, 600, 1000, tuple(range(38)))])
    (job,) = simulation.jobs

    def switch() -> None:
        (node,) = (node for node in simulation.nodes.values() if job in node.jobs)
        simulation.cluster.switch(node, "prefill")

    simulation.clock.at(15.1, switch)
    simulation.run()
    assert simulation.moves.num_moved == 1
    for node in simulation.nodes.values():
        view = node.refresh()
        assert view.num_running == view.num_context_tokens == view.num_batch_tokens == 0


@pytest.mark.slow
@settings(max_examples=12, deadline=None)
@given(st.integers(0, 1000), st.lists(st.tuples(st.floats(0.1, 20), st.booleans()), max_size=4))
def test_requests_that_move_lose_no_token_whatever_fails(seed: int, events: list[tuple[float, bool]]) -> None:
    """``run`` checks that nothing is lost, held or counted at the end; ``served``, that no token is."""
    failed = {"prefill": 0, "decode": 0}
    changes = []
    for at_s, decode in sorted(events):
        role: Role = "decode" if decode else "prefill"
        changes += [ClusterEvent(at_s, "fail", role, failed[role]), ClusterEvent(at_s, "join", role)]
        failed[role] += 1
    scenario = Scenario(
        STEEP, num_prefill=2, num_decode=3, slo=Slo(5.0, 0.02), migrate=ALL, events=tuple(changes)
    )
    run(scenario, long_answers(seed))
    run(scenario, chat(seed))


@pytest.mark.parametrize("seed", range(3))
def test_a_planned_fleet_loses_nothing_while_requests_move(seed: int) -> None:
    bounds = {"prefill": Bounds(1, 6, 0), "decode": Bounds(1, 6, 0)}
    rules = Rules(bounds, hold_s=6.0, lend_s=6.0, cooldown_s=4.0, can=frozenset({ADD, REMOVE, SWITCH}))
    scenario = Scenario(
        STEEP,
        num_prefill=1,
        num_decode=1,
        slo=Slo(5.0, 0.02),
        migrate=ALL,
        elastic=Elastic(rules, join_s=2.0),
    )
    simulation, _ = run(scenario, [*chat(seed), *long_answers(seed)])
    assert simulation.fleet is not None
    assert {change.kind for change in simulation.fleet.changes} >= {ADD, REMOVE}
