"""Turns among tenants: they come in order, and a priority only exchanges turns of one tenant.

The conductor's batch queue and the engine's queues use it. Priorities do not change the turns of other
tenants.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from operator import attrgetter
from typing import Any, Protocol, TypeVar


class Turn(Protocol):
    """``order``: its turn among all, the smallest first. ``rank``: its place among those of its tenant.

    Both are unique within a queue.
    """

    tenant: str
    rank: tuple[Any, ...]
    order: tuple[Any, ...]


T = TypeVar("T", bound=Turn)

_order = attrgetter("order")
_rank = attrgetter("rank")


def join(queue: list[T], one: T) -> None:
    """Insert ``one`` into a queue sorted by ``order``, and assign the turns of its tenant again, by rank."""
    at = bisect_left(queue, one.order, key=_order)
    queue.insert(at, one)
    before = next((other for other in queue[at - 1 :: -1] if other.tenant == one.tenant), one) if at else one
    after = next((other for other in queue[at + 1 :] if other.tenant == one.tenant), one)
    if before.rank <= one.rank <= after.rank:
        return  # mostly: without priorities
    places = [i for i, other in enumerate(queue) if other.tenant == one.tenant]
    orders = [queue[i].order for i in places]
    ranked = sorted((queue[i] for i in places), key=_rank)
    for i, other, order in zip(places, ranked, orders, strict=True):
        other.order, queue[i] = order, other


def last(some: Iterable[T]) -> T:
    """The one that yields first: the last in rank of the tenant with the last turn, which it now has."""
    some = list(some)
    latest = max(some, key=_order)
    yields = max((one for one in some if one.tenant == latest.tenant), key=_rank)
    latest.order, yields.order = yields.order, latest.order
    return yields
