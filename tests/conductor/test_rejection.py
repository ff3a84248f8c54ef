"""Which requests an overloaded cluster turns away, and at which stage."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.conductor.admission.rejection import REJECTIONS, DecodeOutlook
from moonpool.conductor.costs.model import CostModel, Profile
from moonpool.conductor.observing.slo import Slo
from moonpool.conductor.placing.decode_schedule import DecodeSchedule
from moonpool.conductor.placing.node_view import NodeView
from moonpool.conductor.placing.placement import Placement, PrefillEstimate, Reason

STEP = Profile(0.0, 0.0, 0.0, decode_base_s=0.0, decode_sequence_s=0.01, decode_context_s=0.0)
SLO = Slo(ttft_s=10.0, tbt_s=0.1)  # ten sequences in a batch


def placed(ttft_s: float) -> Placement:
    prefill = PrefillEstimate("p", queue_s=ttft_s, fetch_s=0.0, compute_s=0.0, ttft_s=ttft_s, local_tokens=0)
    return Placement(prefill, None, Reason.ONLY, "", (prefill,), ())


def outlook(schedule: DecodeSchedule, num_blocks: int = 0) -> DecodeOutlook:
    view = NodeView("d", CostModel().node(STEP), num_blocks=num_blocks)
    return DecodeOutlook(view, schedule, num_tokens=100, expected_tokens=28, block_size=16)


def running(count: int, ends_s: float) -> DecodeSchedule:
    schedule = coming(count, starts_s=0.0, ends_s=ends_s)
    for key in range(count):
        schedule.begin(key, 0.0)
    return schedule


def coming(count: int, starts_s: float, ends_s: float) -> DecodeSchedule:
    schedule = DecodeSchedule()
    for key in range(count):
        schedule.add(key, starts_s=starts_s, ends_s=ends_s, num_tokens=100)
    return schedule


def test_no_policy_but_none_lets_a_late_first_token_pass() -> None:
    for name, policy in REJECTIONS.items():
        rejection = policy.at_arrival(placed(12.0), outlook(DecodeSchedule()), SLO, 0.0)
        assert (rejection is None) == (name == "none"), name
        if rejection:
            assert rejection.stage == "arrival"
            assert rejection.retry_after_s == pytest.approx(2.0)
            assert "12 s" in rejection.reason


def test_full_decode_is_seen_at_arrival_by_early_and_after_the_prefill_by_baseline() -> None:
    full = outlook(running(10, ends_s=100.0))
    assert REJECTIONS["baseline"].at_arrival(placed(1.0), full, SLO, 0.0) is None
    late = REJECTIONS["baseline"].before_decode(full, SLO, 1.0)
    assert late is not None and late.stage == "decode"
    early = REJECTIONS["early"].at_arrival(placed(1.0), full, SLO, 0.0)
    assert early is not None and early.stage == "arrival"
    assert early.retry_after_s == pytest.approx(100.0)


def test_one_batch_keeps_the_shortest_slo_of_its_requests() -> None:
    patient = Slo(ttft_s=100.0, tbt_s=1.0)
    alone, beside = running(12, ends_s=100.0), running(12, ends_s=100.0)
    beside.add("chat", starts_s=0.0, ends_s=1.0, num_tokens=100, tbt_s=SLO.tbt_s)
    assert REJECTIONS["baseline"].before_decode(outlook(alone), patient, 1.0) is None
    refused = REJECTIONS["baseline"].before_decode(outlook(beside), patient, 1.0)
    assert refused is not None and "0.1 s between tokens" in refused.reason
    beside.remove("chat")
    assert REJECTIONS["baseline"].before_decode(outlook(beside), patient, 1.0) is None


def test_predicted_sees_who_will_have_ended() -> None:
    full_now = outlook(running(10, ends_s=3.0))
    assert REJECTIONS["early"].at_arrival(placed(4.0), full_now, SLO, 0.0) is not None
    assert REJECTIONS["predicted"].at_arrival(placed(4.0), full_now, SLO, 0.0) is None


def test_predicted_sees_who_is_on_the_way() -> None:
    full_soon = outlook(coming(10, starts_s=2.0, ends_s=100.0))
    assert REJECTIONS["early"].at_arrival(placed(4.0), full_soon, SLO, 0.0) is None
    assert REJECTIONS["predicted"].at_arrival(placed(4.0), full_soon, SLO, 0.0) is not None


def test_a_pool_without_room_is_full_whatever_a_step_takes() -> None:
    schedule = running(3, ends_s=100.0)
    assert outlook(schedule, num_blocks=30).gap_s(0.0, 0.0) < math.inf
    full = outlook(schedule, num_blocks=26)
    assert full.gap_s(0.0, 0.0) == math.inf
    rejection = REJECTIONS["early"].at_arrival(placed(1.0), full, SLO, 0.0)
    assert rejection is not None and "no KV blocks" in rejection.reason
    assert REJECTIONS["early"].at_arrival(placed(1.0), full, Slo(), 0.0) is None, "any latency will do"


def test_a_request_does_not_count_against_itself() -> None:
    schedule = running(9, ends_s=100.0)
    mine = DecodeOutlook(outlook(schedule).view, schedule, 100, 28, 16, key=3)
    assert REJECTIONS["baseline"].before_decode(mine, SLO, 0.0) is None


@given(
    st.lists(st.tuples(st.floats(0, 100), st.floats(0, 100), st.booleans()), max_size=30),
    st.floats(0, 200),
    st.floats(0, 200),
)
def test_who_is_there_is_counted_now_and_less_and_less_later(
    stays: list[tuple[float, float, bool]], now_s: float, later_s: float
) -> None:
    schedule = DecodeSchedule()
    for key, (starts_s, duration_s, begun) in enumerate(stays):
        schedule.add(key, starts_s=starts_s, ends_s=starts_s + duration_s, num_tokens=10)
        if begun:
            schedule.begin(key, now_s)
    begun = sum(begun for *_, begun in stays)
    assert schedule.batch_at(now_s, now_s) == (begun, 10 * begun), "late ones are not there yet"
    count, num_tokens = schedule.batch_at(now_s, now_s + later_s)
    assert 0 <= count <= len(stays)
    assert num_tokens == pytest.approx(10 * count)
    for key in range(len(stays)):
        schedule.remove(key)
    assert schedule.batch_at(now_s, now_s) == (0, 0) and schedule.next_end_s(now_s) == now_s


def test_a_stay_counts_with_the_probability_that_it_lasts() -> None:
    schedule = running(1000, ends_s=10.0)
    count, _ = schedule.batch_at(0.0, 10.0)
    assert count == pytest.approx(1000 / math.e)
