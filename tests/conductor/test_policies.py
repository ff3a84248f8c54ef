"""Laws of every placement policy, and what each one goes by."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.conductor.observing.slo import Slo
from moonpool.conductor.placing.cluster_view import ClusterView, PlaceRequest
from moonpool.conductor.placing.node_table import NodeTable
from moonpool.conductor.placing.place import place
from moonpool.conductor.placing.placement import Placement, PrefillEstimate
from moonpool.conductor.placing.policies import POLICIES, Goodput, KvAware
from tests.conductor.views import REQUEST, cluster, node, placed

BY_ESTIMATE = sorted(set(POLICIES) - {"random", "round-robin"})

views = st.builds(
    lambda queues, batches, prefixes, turn, draw: replace(
        cluster(
            [node(f"p{i}", queue_s=q) for i, q in enumerate(queues)],
            [node(f"d{i}", num_running=n, num_context_tokens=100 * n) for i, n in enumerate(batches)],
            dict(zip([f"p{i}" for i in range(6)] + [f"d{i}" for i in range(6)], prefixes, strict=True)),
        ),
        turn=turn,
        draw=draw,
    ),
    queues=st.lists(st.floats(0, 10), min_size=1, max_size=6),
    batches=st.lists(st.integers(0, 64), min_size=1, max_size=6),
    prefixes=st.lists(st.integers(0, 80), min_size=12, max_size=12),
    turn=st.integers(0, 1000),
    draw=st.floats(0, 1, exclude_max=True),
)
requests = st.builds(lambda n: replace(REQUEST, num_tokens=n, deadline_s=float("inf")), st.integers(1, 2000))


@given(policy=st.sampled_from(sorted(POLICIES)), view=views, request=requests)
def test_every_policy_places_purely_and_explains_itself(
    policy: str, view: ClusterView, request: PlaceRequest
) -> None:
    placement = placed(request, view, policy)
    assert placement == placed(request, view, policy)
    for estimate in placement.prefill_candidates:
        parts_s = estimate.queue_s + estimate.fetch_s + estimate.load_s + estimate.compute_s
        assert estimate.ttft_s == pytest.approx(parts_s)
    for step in placement.decode_candidates:
        decoding_s = step.step_s * request.expected_tokens
        assert step.total_s == pytest.approx(step.transfer_s + step.wait_s + decoding_s)
    chosen = placement.prefill
    assert chosen in placement.prefill_candidates
    assert placement.decode in placement.decode_candidates
    assert chosen.prefix_tokens < request.num_tokens
    if chosen.fetched_tokens:
        assert POLICIES[policy].fetches
        assert chosen.fetch_from != chosen.node_id
        assert view.prefix_blocks[chosen.fetch_from] * 16 >= chosen.prefix_tokens
    facts = placement.to_dict()
    assert (facts["reason"], facts["policy"]) == (placement.reason.value, policy)


@given(policy=st.sampled_from(BY_ESTIMATE), view=views, request=requests, seed=st.integers(0, 99))
def test_the_order_of_nodes_changes_nothing(
    policy: str, view: ClusterView, request: PlaceRequest, seed: int
) -> None:
    prefill, decode = list(view.prefill), list(view.decode)
    Random(seed).shuffle(prefill)
    Random(seed).shuffle(decode)
    shuffled = replace(view, prefill=NodeTable(prefill), decode=NodeTable(decode))
    first, second = placed(request, view, policy), placed(request, shuffled, policy)
    assert (first.prefill, first.decode, first.reason) == (second.prefill, second.decode, second.reason)


@given(view=views, request=requests)
def test_a_better_candidate_never_loses(view: ClusterView, request: PlaceRequest) -> None:
    def cost_s(estimate: PrefillEstimate) -> float:
        return estimate.ttft_s + estimate.num_delayed * estimate.compute_s

    goodput = placed(request, view, "goodput")
    assert cost_s(goodput.prefill) <= 1.05 * min(map(cost_s, goodput.prefill_candidates)) + 1e-4
    for name in ("kv-aware", "local-cache"):
        placement = placed(request, view, name)
        assert placement.prefill.ttft_s == min(e.ttft_s for e in placement.prefill_candidates)
    # Who may fetch only where it pays never expects a later first token than who may not.
    best_s = min(e.ttft_s for e in goodput.prefill_candidates)
    assert best_s <= placed(request, view, "local-cache").prefill.ttft_s + 1e-9


@given(view=views, request=requests, ttft_s=st.floats(0.01, 10), tbt_s=st.floats(1e-3, 0.1))
def test_an_slo_guides_and_rejects_nobody(
    view: ClusterView, request: PlaceRequest, ttft_s: float, tbt_s: float
) -> None:
    slo = Slo(ttft_s, tbt_s)
    placement = place(request, view, slo)
    assert isinstance(placement, Placement)
    if any(e.ttft_s <= ttft_s for e in placement.prefill_candidates):
        assert placement.prefill.ttft_s <= ttft_s
    if any(e.step_s <= tbt_s for e in placement.decode_candidates):
        assert placement.decode is not None
        assert placement.decode.step_s <= tbt_s


def test_kv_aware_fetches_by_the_ratio_of_prefixes_whatever_it_costs() -> None:
    view = cluster([node("p0")], [node("d0")], {"p0": 20, "d0": 50})
    for _ in range(30):
        view.links.observe("d0", "p0", 1 << 20, 1.0)
    assert placed(REQUEST, view, "kv-aware").prefill.fetched_tokens == 30 * 16
    assert placed(REQUEST, view, "goodput").prefill.fetched_tokens == 0
    patient = place(REQUEST, view, Slo(), KvAware(threshold=2.5))
    assert isinstance(patient, Placement)
    assert patient.prefill.fetched_tokens == 0


def test_the_simple_policies_fetch_nothing_and_the_paper_s_local_one_counts_what_is_there() -> None:
    view = cluster([node("p0"), node("p1", queue_s=0.01)], [node("d0")], {"p1": 50})
    assert placed(REQUEST, view, "least-loaded").prefill.node_id == "p0"
    assert placed(REQUEST, view, "local-cache").prefill.node_id == "p1"
    for name in ("least-loaded", "local-cache", "round-robin", "random"):
        assert placed(REQUEST, view, name).prefill.fetched_tokens == 0


def test_only_goodput_lets_shorter_prefills_pass() -> None:
    view = cluster([node("p")], [node("d")])
    patience = {name: placed(REQUEST, view, name).patience_s for name in POLICIES}
    assert patience.pop("goodput") == pytest.approx(8 * 0.101)
    assert set(patience.values()) == {0.0}


def test_goodput_orders_requests_of_different_slos_by_their_deadlines() -> None:
    usual = Slo(ttft_s=30.0)
    slack = {name: policy.slack_s(Slo(ttft_s=2.0), usual) for name, policy in POLICIES.items()}
    assert slack.pop("goodput") == -28.0
    assert set(slack.values()) == {0.0}
    goodput = Goodput()
    assert goodput.slack_s(usual, usual) == goodput.slack_s(Slo(), Slo()) == 0.0
    # One without an SLO lets others pass as long as one that is late.
    assert goodput.slack_s(Slo(), usual) == goodput.late_patience_s - 30.0


def test_goodput_lets_those_pass_that_keep_the_slo_before_one_that_misses_it() -> None:
    view, slo = cluster([node("p", queue_s=0.3)], [node("d")]), Slo(ttft_s=0.4)
    patience = {}
    for name, policy in POLICIES.items():
        placement = place(REQUEST, view, slo, policy)
        assert isinstance(placement, Placement)
        patience[name] = placement.patience_s
    assert patience.pop("goodput") == Goodput().late_patience_s
    assert set(patience.values()) == {0.0}
    in_time = place(REQUEST, view, Slo(ttft_s=0.41), POLICIES["goodput"])
    assert isinstance(in_time, Placement)
    assert in_time.patience_s == pytest.approx(8 * 0.101)
