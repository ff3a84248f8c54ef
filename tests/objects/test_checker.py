"""The checker accepts what is possible and rejects what is not, among it what an older client did."""

from __future__ import annotations

import itertools
import random

from hypothesis import given
from hypothesis import strategies as st

from tests.objects.linearizability import PENDING, Operation, is_linearizable


def put(value: int, called_s: float, ended_s: float) -> Operation:
    return Operation("put", value, called_s, ended_s)


def get(value: int | None, called_s: float, ended_s: float) -> Operation:
    return Operation("get", value, called_s, ended_s)


def remove(found: bool, called_s: float, ended_s: float) -> Operation:
    return Operation("remove", found, called_s, ended_s)


def test_one_after_the_other() -> None:
    history = [
        put(1, 0, 1),
        get(1, 2, 3),
        put(2, 4, 5),
        remove(True, 6, 7),
        get(None, 8, 9),
        remove(False, 10, 11),
    ]
    assert is_linearizable(history)
    assert is_linearizable([])


def test_concurrent_puts_in_either_order_but_the_same_for_all() -> None:
    puts = [put(1, 0, 10), put(2, 0, 10)]
    assert is_linearizable([*puts, get(1, 11, 12), get(1, 13, 14)])
    assert is_linearizable([*puts, get(2, 11, 12)])
    assert is_linearizable([*puts, get(2, 1, 2), get(1, 3, 4)])
    assert not is_linearizable([*puts, get(2, 1, 2), get(1, 3, 4), get(2, 5, 6)])
    assert not is_linearizable([*puts, get(1, 11, 12), get(2, 13, 14)])
    assert not is_linearizable([*puts, get(None, 11, 12)])


def test_an_unknown_outcome_may_come_late_or_never_but_once() -> None:
    maybe = put(1, 0, PENDING)
    assert is_linearizable([maybe, get(None, 1, 2), get(None, 3, 4)])
    assert is_linearizable([maybe, get(None, 1, 2), get(1, 3, 4)])
    assert not is_linearizable([maybe, get(1, 1, 2), get(None, 3, 4)])
    assert is_linearizable([maybe, put(2, 1, 2), get(2, 3, 4), get(1, 5, 6)])
    assert not is_linearizable([maybe, get(1, 1, 2), put(2, 3, 4), get(1, 5, 6)])
    assert is_linearizable([put(1, 0, 1), remove(True, 2, PENDING), get(1, 3, 4), get(None, 5, 6)])


def test_an_acknowledged_put_of_a_client_whose_clock_is_behind() -> None:
    """Recorded when the version was the client's clock: the second client's was an hour behind."""
    history = [put(1, 3.194509, 3.347286), put(2, 3.347356, 3.357982), get(1, 3.358027, 3.362370)]
    assert not is_linearizable(history)


def test_an_object_that_a_restarted_node_brings_back() -> None:
    """Recorded when each node told what it had: one of two was away during the remove, or the put."""
    removed = [
        put(1, 3.362423, 3.403070),
        remove(True, 3.898614, 3.906072),
        get(None, 3.906114, 3.908202),
        get(1, 13.282622, 13.295409),
    ]
    assert not is_linearizable(removed)
    replaced = [
        put(1, 13.295453, 13.365364),
        put(2, 14.793299, 14.799721),
        get(2, 14.799746, 14.801534),
        get(1, 25.318281, 25.378797),
    ]
    assert not is_linearizable(replaced)


@given(st.integers(0, 2**32), st.integers(0, 8), st.booleans())
def test_as_all_orders_say(seed: int, count: int, possible: bool) -> None:
    """Against trying every order. ``possible`` histories are made by operations that did take effect once."""
    rng = random.Random(seed)
    history, state = [], None
    for number in range(min(count, 6)):
        at_s = float(number)
        called_s, ended_s = at_s - rng.random() * 3, at_s + rng.random() * 3
        kind = rng.choice(("put", "get", "remove"))
        value: int | bool | None = number
        if kind == "get":
            value = state if possible else rng.choice((None, *range(number)))
        elif kind == "remove":
            value = state is not None if possible else rng.random() < 0.5
        state = state if kind == "get" else number if kind == "put" else None
        history.append(Operation(kind, value, called_s, PENDING if rng.random() < 0.1 else ended_s))
    found = is_linearizable(history)
    assert found or not possible
    assert found == any(explains(order) for order in orders(history))


def orders(history: list[Operation]) -> list[tuple[Operation, ...]]:
    pending = [each for each in history if each.ended_s == PENDING]
    done = [each for each in history if each.ended_s < PENDING]
    return [
        order
        for size in range(len(pending) + 1)
        for some in itertools.combinations(pending, size)
        for order in itertools.permutations([*done, *some])
    ]


def explains(order: tuple[Operation, ...]) -> bool:
    state: int | None = None
    for at, each in enumerate(order):
        if any(later.ended_s < each.called_s for later in order[at:]):
            return False
        if each.kind == "get" and each.ended_s < PENDING and each.value != state:
            return False
        if each.kind == "remove" and each.ended_s < PENDING and each.value != (state is not None):
            return False
        state = state if each.kind == "get" else each.value if each.kind == "put" else None
    return True
