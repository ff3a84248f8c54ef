"""Laws of the simulated cluster."""

from __future__ import annotations

import random
from dataclasses import replace
from statistics import fmean
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from moonpool.conductor.admission.rejection import REJECTIONS, DecodeOutlook
from moonpool.conductor.costs.model import Profile
from moonpool.conductor.observing.slo import Slo
from moonpool.conductor.placing.cluster_view import PlaceRequest
from moonpool.conductor.placing.place import place
from moonpool.conductor.placing.placement import Placement, Rejection
from moonpool.conductor.placing.policies import POLICIES
from moonpool.runtime.errors import ConfigError
from moonpool.simulator.cluster.job import Job
from moonpool.simulator.cluster.node import Node
from moonpool.simulator.inputs.hardware import SHIPPED, Hardware, tensor_parallel
from moonpool.simulator.inputs.scenario import ClusterEvent, Scenario
from moonpool.simulator.inputs.trace import TraceRequest
from moonpool.simulator.inputs.workload import Workload
from moonpool.simulator.outcome import Outcome
from moonpool.simulator.simulation import Simulation

A800 = tensor_parallel(*SHIPPED["8xa800-llama3-70b"])
# A small node, so that a few requests fill it.
SMALL = Hardware(
    name="small",
    profile=Profile(0.01, 1e-4, 1e-9, 0.02, 1e-4, 1e-7),
    kv_token_nbytes=1000,
    pool_tokens=512 * 60,
    host_tokens=512 * 40,
    host_load_nbytes_per_s=1e9,
    ssd_tokens=512 * 40,
    ssd_load_nbytes_per_s=2e8,
    network_nbytes_per_s=1e8,
    chunk_tokens=1024,
)


def run(scenario: Scenario, requests: list[TraceRequest]) -> tuple[Simulation, Outcome]:
    """Run, and check the invariants: no request lost, no block pinned, no load counted at the end."""
    simulation = Simulation(scenario, requests)
    outcome = simulation.run()
    assert len(outcome.served) == len(requests)
    for node in simulation.nodes.values():
        node.memory.check_integrity()
        assert not node.jobs
        assert not node.load.num_requests
        assert not len(node.load.schedule)
        assert node.memory.num_available == node.memory.pool.capacity
        view = node.refresh()
        assert view.num_running == view.num_context_tokens == 0
    return simulation, outcome


def chat(seed: int, sessions: int = 25, rate: float = 4.0) -> list[TraceRequest]:
    work = Workload(
        sessions=sessions, rate=rate, prompt_tokens=1500, output_tokens=40, think_s=2.0, seed=seed
    )
    return work.requests()


def one(input_tokens: int, output_tokens: int = 1, at_s: float = 0.0, first_id: int = 0) -> TraceRequest:
    ids = range(first_id, first_id - (-input_tokens // 512))
    return TraceRequest(at_s, input_tokens, output_tokens, tuple(ids))


def test_a_single_request_takes_what_its_formula_says() -> None:
    hardware = replace(A800, chunk_tokens=100_000)
    _, outcome = run(Scenario(hardware, 2, 2), [one(5000, 101)])
    (served,) = outcome.served
    profile = hardware.profile
    assert served.ttft_s == pytest.approx(profile.prefill_s(5000, 0))
    steps_s = [profile.step_s(1, 5001 + i) for i in range(100)]
    hand_over_s = 5000 * hardware.kv_token_nbytes / hardware.network_nbytes_per_s
    hand_over_s += hardware.network_latency_s
    assert served.e2e_s == pytest.approx(served.ttft_s + hand_over_s + sum(steps_s), rel=1e-6)
    gaps_s = sorted([hand_over_s + steps_s[0], *steps_s[1:]])
    assert served.tpot_s == pytest.approx(sum(gaps_s) / 100, rel=1e-6)
    assert served.tbt_s == pytest.approx(sum(gaps_s[-10:]) / 10, rel=1e-6)


def test_a_hand_over_waits_for_the_slower_of_two_links() -> None:
    """Its 21.5 GB take longer than the prefill of 13.5 s, whichever link has 1 GB/s."""
    slow = replace(A800, network_nbytes_per_s=1e9)

    def hand_over_s(prefill: Hardware, decode: Hardware, factor: float = 1.0) -> float:
        simulation = Simulation(Scenario(prefill, 1, 1, decode_hardware=decode), [one(65_536, 2)])
        simulation.cluster.network.factors["decode-0"] = factor
        simulation.run()
        return float(simulation.jobs[0].gaps_s[0][0])

    expected_s = hand_over_s(slow, slow)
    assert expected_s > 10 * hand_over_s(A800, A800)
    assert hand_over_s(A800, slow) == pytest.approx(expected_s)
    assert hand_over_s(A800, A800, 1e9 / A800.network_nbytes_per_s) == pytest.approx(expected_s)


def test_the_scheduler_does_not_know_how_long_an_answer_will_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither when it places a request nor when it checks it before decode."""
    requests = [one(5000, 200, at_s=60.0 * i, first_id=20 * i) for i in range(3)]
    simulation = Simulation(Scenario(A800, 1, 1), [*requests, one(5000, 5, at_s=300.0, first_id=100)])
    look = simulation.cluster.outlook
    limits, expected = list[int](), list[int]()

    def placed(request: PlaceRequest, *rest: Any) -> Placement | Rejection:
        limits.append(request.remaining_tokens)
        return place(request, *rest)

    def outlook(decode: Node | None, job: Job, tokens: int) -> DecodeOutlook | None:
        expected.append(tokens)
        return look(decode, job, tokens)

    monkeypatch.setattr("moonpool.simulator.simulation.place", placed)
    monkeypatch.setattr(simulation.cluster, "outlook", outlook)
    simulation.run()
    assert limits[-1] == 200
    assert expected[-2:] == [200, 199]


def test_chunks_cost_their_base_each_and_nothing_else() -> None:
    _, outcome = run(Scenario(replace(A800, chunk_tokens=1000), 1, 1), [one(5500)])
    base_s = A800.profile.prefill_base_s
    assert outcome.served[0].ttft_s == pytest.approx(A800.profile.prefill_s(5500, 0) + 5 * base_s)


def test_the_second_of_two_waits_for_the_first_and_hits_its_blocks() -> None:
    _, outcome = run(Scenario(replace(A800, chunk_tokens=100_000), 1, 1), [one(5120), one(5120)])
    first, second = outcome.served
    # One token is always computed, so of ten full blocks nine are of use.
    assert second.ttft_s == pytest.approx(first.ttft_s + A800.profile.prefill_s(512, 4608))
    assert outcome.hit_tokens["pool"] == 4608


def test_a_step_grows_with_its_batch() -> None:
    requests = [one(2000, 50, first_id=100 * i) for i in range(8)]
    alone, together = (
        fmean(each.tpot_s for each in run(Scenario(A800, 8, 1), some)[1].served)
        for some in (requests[:1], requests)
    )
    assert together > alone + 3 * A800.profile.decode_sequence_s


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("rejection", REJECTIONS)
def test_every_request_ends_once_and_nothing_is_left_behind(policy: str, rejection: str) -> None:
    """Twenty sessions a second are too many: each rejection policy but ``none`` rejects some."""
    scenario = Scenario(SMALL, 2, 2, policy=policy, rejection=rejection, slo=Slo(1.0, 0.05))
    requests = chat(1, rate=20.0)
    _, outcome = run(scenario, requests)
    assert [(each.arrival_s, each.input_tokens, each.output_tokens) for each in outcome.served] == [
        (each.arrival_s, each.input_tokens, each.output_tokens) for each in requests
    ]
    assert all(0 < each.ttft_s <= each.e2e_s for each in outcome.completed)
    assert bool(outcome.rejections) == (rejection != "none")


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(st.integers(0, 1000), st.sampled_from([(2, 2, 0), (1, 1, 0), (0, 0, 3)]), st.data())
def test_nodes_that_fail_and_join_lose_no_request(
    seed: int, shape: tuple[int, int, int], data: st.DataObject
) -> None:
    roles = ["both"] if shape[2] else ["prefill", "decode"]
    events = [
        ClusterEvent(data.draw(st.floats(0, 15)), kind, data.draw(st.sampled_from(roles)))
        for kind in ("fail", "join", "fail", "join")
    ]
    joined = [ClusterEvent(0.0, "join", role) for role in roles]  # each role always has a node
    scenario = Scenario(SMALL, *shape, events=[*joined, *events])
    requests = chat(seed, sessions=15)
    _, outcome = run(scenario, requests)
    # A conversation may outgrow a node's memory; faults add nothing to that.
    _, undisturbed = run(Scenario(SMALL, *shape), requests)
    assert outcome.rejections == undisturbed.rejections
    assert set(outcome.rejections) <= {"too large"}


def test_a_request_is_placed_again_as_soon_as_a_node_that_it_needs_is_lost() -> None:
    """Its prefill takes two seconds, and is of no use once the decode node that follows it is gone."""
    lost = ClusterEvent(1.0, "fail", "decode")
    simulation, outcome = run(
        Scenario(SMALL, 2, 1, events=[ClusterEvent(0.5, "join", "decode"), lost]), [one(20_000, 20)]
    )
    undisturbed = run(Scenario(SMALL, 2, 2), [one(20_000, 20)])[1].served[0]
    assert simulation.jobs[0].life.num_attempts == 2
    assert outcome.served[0].ttft_s == pytest.approx(1.0 + undisturbed.ttft_s, rel=0.01)


def test_a_request_whose_last_token_came_as_its_node_failed_is_served() -> None:
    halves = replace(SMALL, profile=Profile(0.5, 0.0, 0.0, 0.5, 0.0, 0.0))
    scenario = Scenario(halves, 0, 0, num_both=2)
    undisturbed = run(scenario, [one(600, 4)])[1].served
    fails = [ClusterEvent(undisturbed[0].e2e_s, "fail", "both", number) for number in range(2)]
    assert run(replace(scenario, events=fails), [one(600, 4)])[1].served == undisturbed


def test_a_request_fails_when_each_of_its_attempts_lost_its_node() -> None:
    events = [
        ClusterEvent(0.1 * n, kind, "prefill", number)
        for n in range(1, 9)
        for kind, number in (("join", 0), ("fail", n - 1))
    ]
    _, outcome = run(Scenario(SMALL, 1, 1, events=events), [one(20_000, 20)])
    assert outcome.rejections == {"failed": 1}


def test_nodes_are_paid_for_while_they_are_there_and_requests_run() -> None:
    requests = [one(5000, 300, at_s=10.0, first_id=20 * i) for i in range(12)]
    joins = [ClusterEvent(10.0, "join", "both")] * 3
    late = [ClusterEvent(500.0, "join", "both"), ClusterEvent(600.0, "fail", "both", 1)]
    scenario = Scenario(replace(SMALL, num_gpus=2), 0, 0, num_both=1, events=[*joins, *late])
    _, outcome = run(scenario, requests)
    assert 0.5 < outcome.busy_ratio <= 1
    assert outcome.node_s == pytest.approx(10.0 + 4 * outcome.span_s)
    assert outcome.gpu_s == pytest.approx(2 * 4 * outcome.span_s)


def test_a_request_waits_for_a_node_that_comes_soon() -> None:
    events = [ClusterEvent(0.5, "fail", "prefill"), ClusterEvent(2.0, "join", "prefill")]
    _, outcome = run(Scenario(SMALL, 1, 1, events=events), [one(2000, 20, at_s=1.0)])
    assert not outcome.rejections
    assert 1.0 <= outcome.served[0].ttft_s < 1.5


def test_without_any_node_left_requests_are_rejected_and_say_so() -> None:
    scenario = Scenario(SMALL, 1, 1, events=[ClusterEvent(0.5, "fail", "decode")])
    _, outcome = run(scenario, chat(1, sessions=5))
    assert outcome.rejections["no node"] > 0


@pytest.mark.parametrize(
    "nodes", [{"num_prefill": 1, "num_decode": 1}, {"num_prefill": 0, "num_decode": 0, "num_both": 1}]
)
def test_what_would_never_fit_is_rejected_and_delays_no_other(nodes: dict[str, int]) -> None:
    """The prompt fits a pool of 60 blocks, and so does its first token; all of its output does not."""
    requests = [one(512 * 59, 600), one(512 * 5, 10, at_s=0.1, first_id=100)]
    _, outcome = run(Scenario(SMALL, **nodes), requests)
    assert [served.rejected for served in outcome.served] == ["too large", ""]


def test_equal_seeds_give_equal_outcomes() -> None:
    def outcome(seed: int) -> Outcome:
        return run(Scenario(SMALL, 3, 2, policy="random", seed=seed), chat(5))[1]

    assert outcome(1).served == outcome(1).served
    assert outcome(1).served != outcome(2).served


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(st.integers(0, 1000))
@example(148)
def test_tokens_come_from_somewhere_exactly_once(seed: int) -> None:
    """Of the requests that fit a node; one that is too large is rejected and has no tokens."""
    _, outcome = run(Scenario(SMALL, 2, 1), chat(seed))
    assert sum(outcome.hit_tokens.values()) == sum(each.input_tokens for each in outcome.completed)


def test_tiers_below_the_pool_are_used_when_it_overflows() -> None:
    rng = random.Random(1)
    documents = [one(5120, 1, first_id=1000 * n) for n in range(9)]
    requests = [replace(rng.choice(documents), arrival_s=2.0 * n) for n in range(60)]
    _, outcome = run(Scenario(SMALL, 1, 1), requests)
    assert outcome.hit_tokens["host"] > 0
    without = run(Scenario(replace(SMALL, host_tokens=0, ssd_tokens=0), 1, 1), requests)[1]
    assert outcome.hit_ratio > without.hit_ratio


def test_a_prefix_is_fetched_where_that_beats_computing() -> None:
    fast = replace(SMALL, network_nbytes_per_s=1e11)
    # The second comes while the holder is busy with something else.
    requests = [one(20_000), one(20_000, at_s=30.0, first_id=5000), one(20_000, at_s=30.01)]
    _, outcome = run(Scenario(fast, 2, 1, policy="kv-aware"), requests)
    assert outcome.hit_tokens["peer"] + outcome.hit_tokens["pool"] >= 512 * 39
    assert outcome.served[2].ttft_s < 0.2


def test_what_is_fetched_from_a_node_that_fails_meanwhile_is_computed() -> None:
    """Only the decode node has the prefix, and fails in the middle of a read of 0.2 s."""
    events = [ClusterEvent(9.0, "join", "prefill"), ClusterEvent(10.0, "fail", "prefill")]
    scenario = Scenario(SMALL, 1, 1, policy="kv-aware", events=events)
    requests = [one(20_000, 2), one(20_000, at_s=30.0)]
    _, fetches = run(scenario, requests)
    assert fetches.hit_tokens["peer"] == 512 * 39
    _, outcome = run(replace(scenario, events=[*events, ClusterEvent(30.1, "fail", "decode")]), requests)
    assert not sum(outcome.hit_tokens[tier] for tier in ("pool", "host", "ssd", "peer"))
    assert outcome.served[1].ttft_s == pytest.approx(0.1 + outcome.served[0].ttft_s)
    assert outcome.moved_nbytes == pytest.approx(fetches.moved_nbytes - 0.1e8, rel=0.01)


def test_a_hot_prefix_is_copied_to_more_nodes_and_released_when_it_is_cold() -> None:
    fast = replace(SMALL, network_nbytes_per_s=1e10)
    # One node could serve them all, and would be busy for four fifths of the time. The question is too short
    # for a block, so that nothing follows the prefix in a cache.
    hot = [TraceRequest(0.05 * n + 2 * (n > 0), 512 * 12 + 300, 1, (*range(12), 99 + n)) for n in range(400)]
    # Long enough after it for its heat to be gone.
    cold = [one(1000, at_s=600.0, first_id=50_000)]
    scenario = Scenario(fast, 4, 1, policy="local-cache", replicate_nbytes_per_s=1e9)
    _, outcome = run(scenario, hot + cold)
    assert outcome.num_copies > 0
    assert outcome.num_released > 0
    assert run(replace(scenario, replicate_nbytes_per_s=0.0), hot + cold)[1].num_copies == 0


def test_a_copy_from_a_node_that_fails_meanwhile_is_not_made() -> None:
    hot = [TraceRequest(0.05 * n + 2 * (n > 0), 512 * 12 + 300, 1, (*range(12), 99 + n)) for n in range(64)]
    slow = replace(SMALL, network_nbytes_per_s=1e7)
    scenario = Scenario(slow, 4, 1, policy="local-cache", replicate_nbytes_per_s=1e9)
    assert run(scenario, hot)[1].num_copies == 1  # it takes from 5 s to 5.6 s
    fails = replace(scenario, events=[ClusterEvent(5.3, "fail", "prefill", 0)])
    assert run(fails, hot)[1].num_copies == 0


@pytest.mark.parametrize(
    ("wrong", "word"),
    [
        ({"replicate_nbytes_per_s": -1.0}, "replicate"),
        ({"num_prefill": 0}, "prefill"),
        ({"num_decode": 0}, "decode"),
        ({"num_both": 1}, "both"),
        ({"policy": "best"}, "best"),
        ({"rejection": "never"}, "never"),
        ({"slo": Slo(ttft_s=0)}, "slo-ttft"),
        ({"slo": Slo(tbt_s=float("nan"))}, "slo-tbt"),
        ({"events": [ClusterEvent(1, "fail", "both")]}, "both"),
    ],
)
def test_impossible_scenarios_are_refused_by_name(wrong: dict[str, object], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        replace(Scenario(SMALL), **wrong)
