"""Turns: what a tenant may do with its priorities, and what it may not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from moonpool.runtime import turns


@dataclass(eq=False)
class Waiting:
    tenant: str
    rank: tuple[Any, ...]
    order: tuple[Any, ...]


ASKED = st.lists(
    st.tuples(st.sampled_from("abc"), st.integers(-2, 2), st.integers(0, 9)), min_size=1, max_size=12
)


def queue_of(asked: list[tuple[str, int, int]]) -> list[Waiting]:
    queue: list[Waiting] = []
    for i, (tenant, priority, arrived) in enumerate(asked):
        turns.join(queue, Waiting(tenant, (priority, arrived, i), (arrived, i)))
    return queue


@given(ASKED, st.integers(-5, 5))
def test_priorities_of_one_tenant_are_nothing_to_the_others(
    asked: list[tuple[str, int, int]], change: int
) -> None:
    queue = queue_of(asked)
    assert [one.order for one in queue] == sorted(one.order for one in queue)
    for tenant in "abc":
        ranks = [one.rank for one in queue if one.tenant == tenant]
        assert ranks == sorted(ranks)
    bold = queue_of([(t, p * change if t == "a" else p, at) for t, p, at in asked])
    assert [one.tenant for one in bold] == [one.tenant for one in queue]
    assert [one.rank for one in bold if one.tenant != "a"] == [one.rank for one in queue if one.tenant != "a"]


@given(ASKED)
def test_the_tenant_with_the_last_turn_yields_and_chooses_which(asked: list[tuple[str, int, int]]) -> None:
    queue = queue_of(asked)
    tenant, turn = queue[-1].tenant, queue[-1].order
    running = list(reversed(queue))
    yields = turns.last(running)
    assert (yields.tenant, yields.order) == (tenant, turn)
    assert yields.rank == max(one.rank for one in queue if one.tenant == tenant)
    assert sorted(one.order for one in running) == [one.order for one in queue_of(asked)]
