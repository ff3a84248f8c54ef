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
    # One that takes longer than predicted delays others no further than by what is left of it: nothing.
    assert queue.wait_s(99.0) == pytest.approx(2.0)


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
        assert queue.wait_s(now_s) <= sum(inside.values()) + 1e-9
        waits_s = [queue.wait_s(now_s, order_s) for order_s in (-1.0, now_s, now_s + 2, math.inf)]
        assert waits_s == sorted(waits_s)
        assert queue.behind(math.inf) == 0
    for key in list(inside):
        assert queue.remove(key, now_s)
    assert queue.wait_s(now_s) == queue.waiting_s == 0.0
