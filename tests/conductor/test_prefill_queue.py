"""The queue of prefills on one node."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.conductor.placing.prefill_queue import PrefillQueue


def test_the_one_that_runs_is_not_interrupted_and_the_others_go_by_order() -> None:
    queue = PrefillQueue()
    queue.add("a", order_s=9.0, compute_s=4.0, now_s=0.0)
    queue.add("b", order_s=5.0, compute_s=2.0, now_s=1.0)
    queue.add("c", order_s=3.0, compute_s=1.0, now_s=1.0)
    assert queue.wait_s(1.0) == pytest.approx(3.0 + 2.0 + 1.0)
    assert queue.wait_s(1.0, order_s=4.0) == pytest.approx(3.0 + 1.0)
    assert queue.wait_s(1.0, order_s=2.0) == pytest.approx(3.0)
    assert [queue.behind(order_s) for order_s in (2.0, 4.0, 6.0)] == [2, 1, 0]
    assert queue.remove("a", 4.5)
    assert queue.wait_s(4.5) == pytest.approx(1.0 + 2.0)
    assert not queue.remove("a", 4.5)
    assert queue.wait_s(5.5) == pytest.approx(2.0)


times = st.floats(0, 100)


@given(started_s=times, compute_s=times, ready_in_s=st.floats(-10, 100), waiting_s=times, after_s=times)
def test_an_overdue_prefill_counts_as_waiting_for_as_long_again(
    started_s: float, compute_s: float, ready_in_s: float, waiting_s: float, after_s: float
) -> None:
    queue = PrefillQueue()
    ready_s = started_s + ready_in_s
    queue.add("a", order_s=0.0, compute_s=compute_s, now_s=started_s, ready_s=ready_s)
    queue.add("b", order_s=1.0, compute_s=waiting_s, now_s=started_s)
    due_s = max(started_s, ready_s) + compute_s
    assert queue.due_s == due_s >= queue.ends_s
    overdue = [queue.wait_s(due_s + overdue_s) for overdue_s in (0.0, after_s, 2 * after_s)]
    expected = [pytest.approx(overdue_s + waiting_s, abs=1e-9) for overdue_s in (0.0, after_s, 2 * after_s)]
    assert overdue == expected, "the longer it stands still, the longer it probably will"
    assert [starts_s for _, starts_s, _ in queue.waiting(due_s + after_s)] == [
        pytest.approx(after_s, abs=1e-9)
    ]
    # Before, it waits for what is predicted: nothing, while others would be computed first.
    assert queue.wait_s(queue.ends_s) == pytest.approx(waiting_s)
    # Neither is left over when it has ended, nor when nothing runs.
    assert queue.remove("a", due_s + after_s)
    assert queue.wait_s(due_s + after_s) == pytest.approx(waiting_s, abs=1e-9)
    assert queue.remove("b", due_s + after_s)
    assert queue.wait_s(due_s + 1e6) == 0.0


@given(
    st.lists(st.tuples(st.integers(0, 9), st.floats(0, 5), st.floats(0.01, 3), st.booleans()), max_size=40)
)
def test_it_waits_for_what_is_in_it_and_ends_empty(steps: list[tuple[int, float, float, bool]]) -> None:
    queue, now_s, inside = PrefillQueue(), 0.0, dict[int, float]()
    for key, order_s, compute_s, adds in steps:
        now_s += 0.1
        if adds and key not in inside:
            queue.add(key, order_s=now_s + order_s, compute_s=compute_s, now_s=now_s)
            inside[key] = compute_s
        else:
            assert queue.remove(key, now_s) == (inside.pop(key, None) is not None)
        assert len(queue) == len(inside)
        overdue_s = max(now_s - queue.due_s, 0.0)
        assert overdue_s <= queue.wait_s(now_s) <= overdue_s + sum(inside.values()) + 1e-9
        waits_s = [queue.wait_s(now_s, order_s) for order_s in (-1.0, now_s, now_s + 2, math.inf)]
        assert waits_s == sorted(waits_s)
        assert queue.behind(math.inf) == 0
    for key in list(inside):
        assert queue.remove(key, now_s)
    assert queue.wait_s(now_s) == queue.waiting_s == 0.0
