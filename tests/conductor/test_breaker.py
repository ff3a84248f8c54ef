"""When a node gets no requests, and how it comes back."""

from __future__ import annotations

import pytest

from moonpool.conductor.fleet.circuit_breaker import CircuitBreaker


class Time:
    now_s = 0.0


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def breaker(time: Time) -> CircuitBreaker:
    return CircuitBreaker("p0", lambda: time.now_s, lambda: None)


def test_a_breaker_opens_longer_each_time_and_one_success_closes_it(
    time: Time, breaker: CircuitBreaker
) -> None:
    assert breaker.closed(0.0)
    breaker.lost()
    time.now_s = 0.1
    breaker.lost()  # the same failure
    assert not breaker.closed(0.2)
    assert breaker.closed(0.25)
    time.now_s = 0.25
    breaker.lost()
    assert breaker.closes_in_s(0.25) == pytest.approx(0.5)
    breaker.succeeded()
    assert breaker.closed(0.25)
    breaker.lost()
    assert breaker.closes_in_s(0.25) == pytest.approx(0.25), "a success resets the time"


def test_a_new_node_gets_one_more_request_with_each_success(breaker: CircuitBreaker) -> None:
    for num_successes in range(8):
        assert breaker.room(num_successes) > 0
        assert breaker.room(num_successes + 1) == 0
        breaker.succeeded()
    assert breaker.room(10_000) > 0


def test_after_a_failure_it_is_probed_with_one(breaker: CircuitBreaker) -> None:
    for _ in range(20):
        breaker.succeeded()
    breaker.lost()
    assert breaker.closed(0.25)
    assert breaker.room(0) > 0 and breaker.room(1) == 0
    breaker.succeeded()
    assert breaker.room(1) > 0 and breaker.room(2) == 0


def test_errors_open_it_only_three_in_a_row(breaker: CircuitBreaker) -> None:
    for _ in range(5):
        breaker.erred()
        breaker.erred()
        breaker.succeeded()
    assert breaker.closed(0.0)
    for _ in range(3):
        breaker.erred()
    assert not breaker.closed(0.0)
