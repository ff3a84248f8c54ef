"""The decisions in one request's life: laws of the pure machine that a run and a simulated job drive."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from moonpool.conductor.observing.slo import Slo
from moonpool.conductor.placing.placement import Placement, PrefillEstimate, Reason, Rejection
from moonpool.conductor.requests.life import LOST, QUEUE, REFUSED, Fail, Look, Refuse, RequestLife, Start

PLACED = Placement(PrefillEstimate("p0", 0.0, 0.0, 0.1, 0.1, 0), None, Reason.LOAD, "", (), ())
LATE = Rejection("too late", stage="arrival")


def never() -> Rejection | None:
    raise AssertionError("no policy may be asked")


def test_only_a_request_that_has_not_begun_is_refused() -> None:
    life = RequestLife(max_attempts=4)
    assert life.decided(PLACED, lambda: LATE) == Refuse(LATE)
    assert life.decided(PLACED, lambda: None) == Start(PLACED)
    assert life.slo(Slo(1.0)) == Slo(1.0)
    life.started()
    assert life.decided(PLACED, never) == Start(PLACED)
    assert life.slo(Slo(1.0)) == Slo()
    assert life.prefilled(0, lambda: LATE) == Refuse(LATE)
    assert life.prefilled(1, never) is None, "tokens were streamed"


def test_a_part_of_a_request_that_has_begun_waits_instead() -> None:
    life = RequestLife(max_attempts=4, follows=True)
    step = life.decided(PLACED, lambda: LATE)
    assert isinstance(step, Look) and step.after_s > 0
    assert life.prefilled(0, never) is None


def test_it_waits_for_a_node_and_not_for_one_that_is_too_small() -> None:
    life = RequestLife(max_attempts=4)
    step = life.decided(Rejection("none is up", role="decode"), never)
    assert isinstance(step, Look) and step.role == "decode"
    too_large = Rejection("it does not fit", capacity_tokens=100)
    assert life.decided(too_large, never) == Refuse(too_large)


@given(
    st.integers(1, 6),
    st.lists(st.tuples(st.sampled_from((LOST, REFUSED, "error", QUEUE)), st.integers(0, 3)), max_size=40),
)
def test_it_fails_after_so_many_failures_without_a_token(most: int, failures: list[tuple[str, int]]) -> None:
    life, num_tokens, without = RequestLife(max_attempts=most), 0, 0
    for number, (cause, num_new) in enumerate(failures):
        life.started()
        if cause == QUEUE:
            assert life.failed(QUEUE, [], num_tokens) == Look(), "no node failed"
            continue
        num_tokens += num_new
        step = life.failed(cause, [f"n{number}"], num_tokens)
        without = 1 if num_new else without + 1
        assert f"n{number}" in life.avoid and len(life.avoid) == without
        if without >= most:
            assert step == Fail(without)
            return
        assert isinstance(step, Look) and 0 <= step.after_s <= 1


def test_an_answer_that_never_began_costs_its_tenant_nothing() -> None:
    life = RequestLife(max_attempts=4)
    assert not life.pays(0, ended_by_client=True), "it was not placed"
    life.started()
    assert life.pays(0, ended_by_client=True)
    assert not life.pays(0, ended_by_client=False)
    assert life.pays(3, ended_by_client=False)
