"""Estimates: what they start from, and how they follow what happens."""

from __future__ import annotations

import math
from dataclasses import astuple, replace

import pytest
from prometheus_client import REGISTRY

from moonpool.conductor.costs.links import LinkModel
from moonpool.conductor.costs.model import UNKNOWN, CostModel, NodeCost, PredictionErrors, Profile
from moonpool.conductor.fleet.timing import StepWindow
from moonpool.conductor.placing.load_ledger import LoadLedger
from tests.conductor.views import REQUEST, cluster, node, placed

PROFILE = Profile(1e-3, 1e-5, 1e-9, 1e-3, 1e-4, 1e-8)


def test_attention_is_charged_for_the_context_each_token_sees() -> None:
    assert PROFILE.prefill_s(100, 0) == pytest.approx(1e-3 + 100 * 1e-5 + 100 * 50 * 1e-9)
    assert PROFILE.prefill_s(100, 1000) == pytest.approx(1e-3 + 100 * 1e-5 + 100 * 1050 * 1e-9)
    assert PROFILE.step_s(4, 1000) == pytest.approx(1e-3 + 4e-4 + 1e-5)


def test_a_profile_ignores_what_it_does_not_know_and_a_node_without_one_gets_defaults() -> None:
    profile = Profile.from_record({"prefill_token_s": 3e-5, "later_field": 1.0})
    assert profile.prefill_token_s == 3e-5
    assert profile.prefill_base_s == 0.0
    assert Profile.from_record({"prefill_token_s": "fast", "decode_base_s": -1.0}) == UNKNOWN
    assert Profile.from_record({}) == Profile.from_record({"prefill_token_s": 0.0}) == UNKNOWN


def test_the_correction_reaches_a_node_twice_as_slow_and_forgets_it() -> None:
    model, node = CostModel(), NodeCost(PROFILE)
    plain_s = PROFILE.prefill_s(100, 0)
    for i in range(40):
        model.observe_prefill(node, uncached_tokens=100, cached_tokens=0, actual_s=2 * plain_s, now_s=i / 100)
    assert node.prefill_s(100, 0, now_s=0.4) == pytest.approx(2 * plain_s, rel=0.2)
    assert node.step_s(1, 0, now_s=0.4) == PROFILE.step_s(1, 0)
    assert node.prefill_s(100, 0, now_s=1200.0) == pytest.approx(plain_s, rel=0.01)
    assert model.errors["prefill"].quantile(0.0) < 20  # type: ignore[operator]


def test_one_absurd_measurement_moves_an_estimate_by_little() -> None:
    model, node = CostModel(), NodeCost(PROFILE)
    plain_s = PROFILE.step_s(1, 10)
    for _ in range(8):
        model.observe_steps(node, plain_s=plain_s, actual_s=plain_s, now_s=0.0)
    model.observe_steps(node, plain_s=plain_s, actual_s=100.0, now_s=0.0)
    assert node.step_s(1, 10, now_s=0.0) < 1.5 * plain_s


def test_a_node_that_was_not_measured_is_taken_to_be_as_far_off_as_the_others() -> None:
    model = CostModel()
    busy, idle = model.node(PROFILE), model.node(PROFILE)
    plain_s = PROFILE.step_s(1, 10)
    for _ in range(30):
        model.observe_steps(busy, plain_s=plain_s, actual_s=2 * plain_s, now_s=0.0)
    assert idle.step_s(1, 10, now_s=0.0) == pytest.approx(busy.step_s(1, 10, now_s=0.0), rel=0.15)
    # What it shows itself counts more than what others do.
    for _ in range(8):
        model.observe_steps(idle, plain_s=plain_s, actual_s=plain_s, now_s=0.0)
    assert idle.step_s(1, 10, now_s=0.0) < 1.2 * plain_s


@pytest.mark.parametrize("times", [0.2, 1.0], ids=["it was busy", "it is slow"])
def test_a_node_that_measured_itself_as_slow_gets_a_request_again(times: float) -> None:
    """One request in five minutes; more only if that one is served as fast as others."""
    model, now_s, chosen = CostModel(), 0.0, list[str]()
    slow = Profile(*(5 * value for value in astuple(PROFILE)))
    views = {name: node(name, cost=model.node(own)) for name, own in (("p0", PROFILE), ("p1", slow))}
    ledgers = {name: LoadLedger(view, lambda: now_s, lambda _: None) for name, view in views.items()}
    for second in range(0, 1000, 2):
        now_s = float(second)
        view = replace(cluster(list(views.values()), [node("d0")]), now_s=now_s)
        prefill = placed(REQUEST, view).prefill
        chosen.append(prefill.node_id)
        ledgers[prefill.node_id].begin_prefill(second, prefill.compute_s, 0.0)
        cost = views[prefill.node_id].cost
        actual_s = cost.profile.prefill_s(REQUEST.num_tokens, 0) * (times if prefill.node_id == "p1" else 1.0)
        now_s += actual_s
        ledgers[prefill.node_id].end_prefill(second)
        model.observe_prefill(
            cost, uncached_tokens=REQUEST.num_tokens, cached_tokens=0, actual_s=actual_s, now_s=now_s
        )
    assert chosen.index("p1") == pytest.approx(141, abs=10), (
        "after five minutes, of which the last tenth is eager"
    )
    later = chosen[chosen.index("p1") :]
    assert later.count("p1") > 150 if times < 1 else later.count("p1") in (2, 3, 4)


def test_a_request_on_trust_is_alone_until_it_has_been_measured() -> None:
    model = CostModel()
    model.node(PROFILE)
    cost = model.node(Profile(*(5 * value for value in astuple(PROFILE))))
    fast_s, slow_s = PROFILE.step_s(8, 8192), cost.profile.step_s(8, 8192)
    assert cost.step_s(8, 8192, 0.0) == slow_s
    assert cost.step_s(8, 8192, 60.0) == slow_s
    assert cost.step_s(8, 8192, 180.0) == pytest.approx(slow_s * 5.5**-0.5, rel=0.01)
    assert fast_s * 0.85 < cost.step_s(8, 8192, 1e6) < fast_s
    cost.decode_correction.used(1e6)
    assert cost.step_s(8, 8192, 1e6) == slow_s
    # A new profile is a new beginning.
    cost.measured(PROFILE, 1e6)
    assert cost.step_s(8, 8192, 2e6) == fast_s


def test_steps_are_timed_in_clumps_and_never_across_a_pause() -> None:
    window = StepWindow()
    assert not window.add(1.0, 100.0, 1, goes_on=True)  # began after a pause: its time is unknown
    fulls = [window.add(1.0, 100.0 + 2.0 * step, 1, goes_on=True) for step in range(1, 17)]
    assert fulls == [False] * 15 + [True]
    assert (window.plain_s, window.actual_s) == (16.0, 32.0)
    assert not window.add(1.0, 134.0, 1, goes_on=False)  # too few to tell
    assert not window.add(1.0, 500.0, 1, goes_on=True)
    for step in range(1, 4):
        window.add(1.0, 500.0 + step, 1, goes_on=True)
    assert window.add(1.0, 504.0, 1, goes_on=False)
    assert window.actual_s == 4.0


def test_a_link_learns_latency_and_rate() -> None:
    links = LinkModel()
    for i in range(100):
        nbytes = (i % 10 + 1) * 1_000_000
        links.observe("p", "d", nbytes, 2e-3 + nbytes / 500e6)
    assert links.seconds("p", "d", 20_000_000, now_s=0.0) == pytest.approx(2e-3 + 0.04, rel=0.1)
    assert links.seconds("p", "d", 0, now_s=0.0) == 0.0
    # A pair that never moved anything is taken to be like those that did.
    assert links.seconds("a", "b", 10_000_000, now_s=0.0, connected=True) == pytest.approx(
        2e-3 + 0.02, rel=0.1
    )


def test_the_first_transfer_of_a_pair_teaches_nothing() -> None:
    links, untouched = LinkModel(), LinkModel()
    first_s = links.seconds("p", "d", 1_000_000, now_s=0.0)
    links.observe("p", "d", 1_000_000, 5.0)
    second_s = links.seconds("p", "d", 1_000_000, now_s=0.0)
    assert second_s == untouched.seconds("p", "d", 1_000_000, now_s=0.0, connected=True)
    # It connects the two, which is known beforehand.
    assert first_s == pytest.approx(second_s + 12e-3)


def test_a_link_starts_from_what_its_nodes_measured_and_follows_it() -> None:
    links = LinkModel()
    links.measured("p", "d", 10e9)
    # The two have met, so nothing is added for that; a byte costs what was measured.
    assert links.seconds("p", "d", 100_000_000, now_s=0.0) == pytest.approx(0.5e-3 + 0.01)
    # What is observed end to end counts, as ever.
    for _ in range(30):
        links.observe("p", "d", 100_000_000, 0.02)
    assert links.seconds("p", "d", 100_000_000, now_s=0.0) == pytest.approx(0.02, rel=0.1)
    # Without traffic of ours the nodes find the link slower and slower: others use it, or a rail is down.
    for turn in range(40):
        links.measured("p", "d", 1e9 + turn)
    assert links.seconds("p", "d", 100_000_000, now_s=0.0) == pytest.approx(0.1, rel=0.1)
    # The same news once more is none.
    before_s = links.seconds("p", "d", 1_000_000, now_s=0.0)
    links.measured("p", "d", 1e9 + 39)
    assert links.seconds("p", "d", 1_000_000, now_s=0.0) == before_s
    # Those that never met are like the others: slower by now than 2 GB/s.
    assert links.seconds("a", "b", 100_000_000, now_s=0.0, connected=True) > 0.06


@pytest.mark.parametrize("rate", [0.0, -1.0, math.inf, math.nan])
def test_a_rate_that_makes_no_sense_teaches_nothing(rate: float) -> None:
    links, untouched = LinkModel(), LinkModel()
    links.measured("p", "d", rate)
    assert links.seconds("p", "d", 1_000_000, now_s=0.0) == untouched.seconds("p", "d", 1_000_000, now_s=0.0)


def test_a_link_of_one_size_only_is_right_for_that_size() -> None:
    links = LinkModel()
    for _ in range(50):
        links.observe("p", "d", 100_000, 1e-3)
    assert links.seconds("p", "d", 100_000, now_s=0.0) == pytest.approx(1e-3, rel=0.15)
    assert links.seconds("p", "d", 1, now_s=0.0) >= 0


def test_a_link_shrugs_off_one_stall_and_believes_several() -> None:
    links = LinkModel()
    for _ in range(20):
        links.observe("p", "d", 100_000, 1e-3)
    calm_s = links.seconds("p", "d", 100_000, now_s=0.0)
    links.observe("p", "d", 100_000, 1.0)
    assert links.seconds("p", "d", 100_000, now_s=0.0) < 1.5 * calm_s
    for _ in range(25):
        links.observe("p", "d", 100_000, 0.1)
    # The stall is doubted for some while, so it follows from below.
    assert 0.07 < links.seconds("p", "d", 100_000, now_s=0.0) <= 0.1


def test_transfers_under_way_share_the_links_of_their_nodes_and_are_forgotten() -> None:
    links = LinkModel(latency_s=0.0, nbytes_per_s=1e6, connect_s=0.0)
    links.begin("a", "b", 1_000_000, now_s=0.0)
    assert links.seconds("a", "c", 1_000_000, now_s=0.0) == pytest.approx(2.0)
    assert links.seconds("c", "b", 1_000_000, now_s=0.5) == pytest.approx(1.5)
    assert links.seconds("a", "c", 100_000, now_s=0.0) == pytest.approx(0.2)  # even shares
    assert links.seconds("c", "d", 1_000_000, now_s=0.0) == pytest.approx(1.0)
    assert links.seconds("a", "b", 1_000_000, now_s=1.0) == pytest.approx(1.0)
    assert links.busy(0.25) == {"a": pytest.approx(750_000)}
    assert links.busy(1.0) == {}


def test_the_number_of_remembered_links_is_bounded() -> None:
    links = LinkModel(capacity=4)
    for i in range(100):
        links.observe(f"p{i}", "d", 1000, 1e-3)
    assert len(links._pairs) == 4


def test_a_pair_in_use_is_not_forgotten_for_newer_ones() -> None:
    links, alone = LinkModel(capacity=4), LinkModel(capacity=4)
    for i in range(100):
        links.observe("a", "hot", 1_000_000, 0.01)
        alone.observe("a", "hot", 1_000_000, 0.01)
        links.observe("a", f"cold-{i}", 1000, 1e-3)
    expected_s = alone.seconds("a", "hot", 1_000_000, now_s=0.0)
    assert links.seconds("a", "hot", 1_000_000, now_s=0.0) == expected_s


def test_prediction_errors_report_quantiles_of_the_latest() -> None:
    errors = PredictionErrors(window=10)
    assert errors.to_dict() == {"count": 0} | {f"p{share}_percent": None for share in (50, 90, 95, 99)}
    for actual in range(1, 21):
        errors.add(predicted=0.0, actual=actual)
    errors.add(predicted=1.0, actual=2.0)
    assert errors.quantile(0.0) == 50.0
    assert errors.quantile(0.9) == 100.0
    assert errors.count == 21


def test_errors_are_exported_as_percentages() -> None:
    model = CostModel()

    def exported(percentile: str) -> float | None:
        labels = {"estimate": "ttft", "percentile": percentile}
        return REGISTRY.get_sample_value("moonpool_prediction_error_percent", labels)

    assert math.isnan(exported("50") or 0.0)
    for actual_s in (1.0, 2.0, 4.0):
        model.observe_ttft(1.0, actual_s)
    assert exported("50") == pytest.approx(50.0)
    assert exported("90") == pytest.approx(75.0)


def test_a_node_that_measured_only_its_tiers_computes_like_any_unknown_one() -> None:
    tiers = {"host_load_nbytes_per_s": 8e9, "ssd_load_nbytes_per_s": 2e9}
    profile = Profile.from_record({"prefill_token_s": 0.0, **tiers})
    assert profile.prefill_s(100, 0) == UNKNOWN.prefill_s(100, 0)
    assert NodeCost(profile).load_s(8_000_000, 2_000_000) == pytest.approx(2e-3)
    assert NodeCost(UNKNOWN).load_s(8_000_000, 0) > 0
