"""When a node is left alone, and how it comes back."""

from __future__ import annotations

import pytest

from moonpool.conductor.fleet.circuit_breaker import CircuitBreaker


def test_a_breaker_opens_longer_each_time_and_one_success_closes_it() -> None:
    breaker = CircuitBreaker()
    assert breaker.closed(0.0)
    breaker.fail(0.0)
    breaker.fail(0.1)  # the same trouble
    assert not breaker.closed(0.2)
    assert breaker.closed(0.25)
    breaker.fail(0.25)
    assert breaker.closes_in_s(0.25) == pytest.approx(0.5)
    breaker.succeed()
    assert breaker.closed(0.25)
    assert breaker.failures == 0


def test_a_node_that_comes_is_given_one_more_with_each_success() -> None:
    breaker = CircuitBreaker()
    for num_successes in range(8):
        assert breaker.has_room(num_successes)
        assert not breaker.has_room(num_successes + 1)
        breaker.succeed()
    assert breaker.has_room(10_000)


def test_after_a_failure_it_is_probed_with_one() -> None:
    breaker = CircuitBreaker()
    for _ in range(20):
        breaker.succeed()
    breaker.fail(0.0)
    assert breaker.closed(0.25)
    assert breaker.has_room(0) and not breaker.has_room(1)
    breaker.succeed()
    assert breaker.has_room(1) and not breaker.has_room(2)
