"""The load of a node: requests placed here, requests of others, and what it reports."""

from __future__ import annotations

import pytest

from moonpool.conductor.costs.learned import LearnedCosts
from moonpool.conductor.placing.load_ledger import LoadLedger
from moonpool.conductor.placing.node_view import Load, NodeView
from tests.conductor.views import node


@pytest.fixture
def changes() -> list[str]:
    return []


@pytest.fixture
def ledger(changes: list[str]) -> LoadLedger:
    return LoadLedger(node("n0"), lambda: 100.0, lambda view: changes.append(view.node_id))


def begin_decode(ledger: LoadLedger, key: object, num_tokens: int = 1000, expected_tokens: int = 60) -> None:
    ledger.begin_decode(
        key,
        num_tokens,
        expected_tokens=expected_tokens,
        num_blocks=70,
        starts_in_s=2.0,
        lasts_s=10.0,
    )


def test_a_decode_is_scheduled_with_its_average_context(ledger: LoadLedger) -> None:
    begin_decode(ledger, "a", num_tokens=1000, expected_tokens=60)
    ledger.decoding("a")
    assert ledger.schedule.batch_at(100.0, 100.0) == (1, 1030)


def test_an_engine_is_overdue_once_it_is_known_what_it_takes() -> None:
    cost = LearnedCosts().new()
    view = NodeView("e0", cost, num_free_blocks=1000)
    ledger = LoadLedger(view, lambda: 100.0, lambda view: None)
    ledger.begin_prefill("a", 0.01, 0.0)
    assert view.queue.overdue_s(160.0) == 0
    ledger.end_prefill("a")
    for _ in range(4):
        cost.learn_prefill(1000, 0, 0.5, 100.0)
    ledger.begin_prefill("b", 0.5, 0.0)
    assert view.queue.overdue_s(160.0) == pytest.approx(59.5)


def test_context_follows_the_delivered_tokens_and_ends_at_zero(ledger: LoadLedger) -> None:
    begin_decode(ledger, "a")
    begin_decode(ledger, "b")
    ledger.on_step(num_delivered=7, num_running=5, num_waiting=2, num_free_blocks=9)
    view = ledger.view
    assert (view.num_running, view.num_context_tokens) == (5, 2007)
    assert (view.num_waiting, view.num_free_blocks) == (2, 9)
    ledger.end_decode("a", 4)
    ledger.end_decode("a", 4)
    assert (view.num_running, view.num_context_tokens) == (4, 1003), "three of others run there too"
    ledger.end_decode("b", 3)
    assert (view.num_context_tokens, ledger.num_requests, ledger.booked) == (0, 0, Load())


def test_the_context_of_other_conductors_counts(ledger: LoadLedger) -> None:
    report = {"num_blocks": 100, "num_free_blocks": 50, "num_waiting": 0}
    ledger.on_heartbeat(**report, num_running=3, num_context_tokens=9000, queued_s=0.0)
    assert ledger.view.num_context_tokens == 9000
    begin_decode(ledger, "a")
    assert ledger.view.num_context_tokens == 10000, "it is not in the batch yet"
    ledger.decoding("a")
    ledger.on_step(num_delivered=1, num_running=4, num_waiting=0, num_free_blocks=9, num_context_tokens=10004)
    assert ledger.view.num_context_tokens == 10004
    ledger.end_decode("a", 1)
    assert ledger.view.num_context_tokens == 9003


def test_a_request_with_both_stages_on_one_node_is_counted_once(ledger: LoadLedger) -> None:
    ledger.begin_prefill("a", 1.0, 0.0)
    begin_decode(ledger, "a")
    ledger.begin_prefill("b", 1.0, 0.0)
    assert ledger.view.num_placed == 2
    assert ledger.prefilled_alone("a") is False


def test_foreign_load_is_the_report_less_what_was_placed_here(ledger: LoadLedger) -> None:
    report = {"num_blocks": 100, "num_free_blocks": 50, "num_waiting": 0, "num_running": 0}
    ledger.begin_prefill("a", 2.0, 0.0)
    ledger.on_heartbeat(**report, queued_s=5.0)
    assert ledger.view.foreign_queue_s == pytest.approx(3.0)
    ledger.book_foreign(Load(prefill_s=1.0))
    ledger.on_heartbeat(**report, queued_s=5.0)
    assert ledger.view.foreign_queue_s == 1.0, "bookings are newer than heartbeats"


def test_queued_tokens_are_known_by_tenant(ledger: LoadLedger) -> None:
    assert ledger.queued() == {}
    for key, tenant, num_tokens in (("1", "a", 100), ("2", "b", 900), ("3", "a", 200)):
        ledger.begin_prefill(key, 1.0, 0.0, tenant, num_tokens)
    assert ledger.queued() == {"tokens": 1200, "tenant": "b", "tenant_tokens": 900}
    ledger.end_prefill("2")
    ledger.end_prefill("2")
    assert ledger.queued() == {"tokens": 300, "tenant": "a", "tenant_tokens": 300}
    ledger.end_prefill("1")
    ledger.end_prefill("3")
    assert ledger.queued() == {}


def test_every_change_is_told(ledger: LoadLedger, changes: list[str]) -> None:
    ledger.begin_prefill("a", 1.0, 0.0)
    ledger.end_prefill("a")
    ledger.end_prefill("a")
    begin_decode(ledger, "a")
    assert changes == ["n0"] * 3
