"""The cost of engines, fitted to what their requests took: few measurements, slow ones, and none for long."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moonpool.conductor.costs.learned import LearnedCost, LearnedCosts
from moonpool.conductor.placing.load_ledger import LoadLedger
from moonpool.conductor.placing.node_view import NodeView
from tests.conductor.views import REQUEST, cluster, placed

BLOCK_SIZE = 16


def engine(node_id: str, cost: LearnedCost) -> NodeView:
    return NodeView(node_id, cost, num_free_blocks=1000, serves_whole=True)


@pytest.mark.parametrize("policy", ["local-cache", "goodput"])
@pytest.mark.parametrize("stall_s", [0.0, 1.0, 5.0])
def test_one_stalled_prompt_does_not_send_the_next_away_from_its_prefix(policy: str, stall_s: float) -> None:
    """A prompt of 700 tokens takes 0.17 s. The second engine has computed one, and was stalled meanwhile."""
    costs = LearnedCosts()
    first, second = engine("first", costs.new()), engine("second", costs.new())
    assert isinstance(first.cost, LearnedCost) and isinstance(second.cost, LearnedCost)
    first.cost.learn_prefill(400, 0, 0.1, 0.0)
    first.cost.learn_prefill(16, 384, 0.024, 0.0)
    second.cost.learn_prefill(700, 0, 0.17 + stall_s, 0.0)
    view = cluster([first, second], [first, second], {"second": 42})
    placement = placed(replace(REQUEST, num_tokens=700), view, policy)
    assert placement.prefill.node_id == "second", placement
    assert placement.prefill.local_tokens == 42 * BLOCK_SIZE


@pytest.mark.parametrize("times", [0.1, 10.0])
def test_an_engine_unlike_the_others_is_believed_once_it_has_measured_enough(times: float) -> None:
    costs = LearnedCosts()
    usual, other = costs.new(), costs.new()
    for _ in range(40):
        usual.learn_prefill(1000, 0, 0.5, 0.0)
        usual.learn_step(1, 1000, 0.01, 0.0)
    for count in range(1, 8):
        other.learn_prefill(1000, 0, 0.5 * times, 0.0)
        other.learn_step(1, 1000, 0.01 * times, 0.0)
        known = 1.0 if count < 4 else times
        assert other.prefill_s(1000, 0, 0.0) == pytest.approx(0.5 * known, rel=0.1)
        assert other.step_s(1, 1000, 0.0) == pytest.approx(0.01 * known, rel=0.1)
        assert usual.prefill_s(1000, 0, 0.0) == pytest.approx(0.5, rel=0.1)
        assert usual.step_s(1, 1000, 0.0) == pytest.approx(0.01, rel=0.1)


@pytest.mark.parametrize("stalled", [True, False], ids=["it was stalled", "it is slow"])
@pytest.mark.parametrize("kind", ["prefill", "step"])
def test_an_engine_that_was_slow_gets_a_request_again(kind: str, stalled: bool) -> None:
    """One request in five minutes; more only if that one is served as fast as others."""
    costs, now_s, chosen = LearnedCosts(), 0.0, list[str]()
    views = {name: engine(name, costs.new()) for name in ("e0", "e1")}
    ledgers = {name: LoadLedger(view, lambda: now_s, lambda _: None) for name, view in views.items()}

    def learn(name: str, times: float) -> None:
        cost = views[name].cost
        assert isinstance(cost, LearnedCost)
        cost.learn_prefill(1000, 0, 0.5 * (times if kind == "prefill" else 1), now_s)
        cost.learn_step(1, 1000, 0.01 * (times if kind == "step" else 1), now_s)

    for _ in range(4):
        learn("e0", 1.0)
        learn("e1", 5.0)
    for second in range(0, 1000, 2):
        now_s = float(second)
        view = replace(cluster(list(views.values()), list(views.values())), now_s=now_s)
        placement = placed(REQUEST, view)
        name = placement.prefill.node_id
        chosen.append(name)
        ledger = ledgers[name]
        ledger.begin_prefill(second, placement.prefill.compute_s, 0.0)
        ledger.begin_decode(second, 1000, expected_tokens=50, num_blocks=70, starts_in_s=0.5, lasts_s=0.5)
        now_s += 1.0
        ledger.end_prefill(second)
        ledger.end_decode(second, 0)
        learn(name, 5.0 if name == "e1" and not stalled else 1.0)
    assert 60 < chosen.index("e1") < 160, "after two to five minutes"
    later = chosen[chosen.index("e1") :]
    assert later.count("e1") > 100 if stalled else later.count("e1") in (2, 3, 4)
