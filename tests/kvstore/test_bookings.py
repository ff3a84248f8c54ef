"""Several conductors on one Redis never give the same room away twice."""

from __future__ import annotations

import asyncio
from typing import Any

from moonpool.conductor.coordination.bookings import Bookings, Choice
from moonpool.conductor.placing.node_view import Load
from moonpool.kvstore.index.redis.kv_index import KVIndex

D0, D1 = Choice("d0@1", capacity=10), Choice("d1@1", capacity=10)
P0, P1 = Choice("p0@1", ttft_s=0.1), Choice("p1@1", ttft_s=0.2)


def conductors(redis: Any, *names: str, lease_ttl_s: float = 30.0) -> list[Bookings]:
    index = KVIndex(redis, "test")
    return [Bookings(index, name, lease_ttl_s=lease_ttl_s) for name in names]


async def test_each_sees_what_the_others_have(redis: Any) -> None:
    a, b = conductors(redis, "a", "b")
    assert await a.beat({"d0@1": Load(3, 0.0), "p0@1": Load(0, 0.25)}) == (0, {})
    assert await b.beat({"d0@1": Load(1, 0.0)}) == (1, {"d0@1": Load(3, 0.0), "p0@1": Load(0, 0.25)})
    assert await a.beat({}) == (1, {"d0@1": Load(1, 0.0)})
    assert await b.beat({}) == (1, {}), "a beat replaces what was there"


async def test_the_first_node_with_room_is_taken_and_never_beyond_its_capacity(redis: Any) -> None:
    names = ("a", "b", "c")
    own = dict.fromkeys(names, 0)
    all_of_them = dict(zip(names, conductors(redis, *names), strict=True))
    for bookings in all_of_them.values():
        await bookings.beat({})
    taken = {0: 0, 1: 0}

    async def ask(name: str) -> None:
        booking = await all_of_them[name].book([P0], [D0, D1], 3, 0.0)
        own[name] += 1
        if booking.had_room:
            taken[booking.decode] += 3
        else:
            assert booking.decode == 0

    # Eighteen at once from three sides, of which six fit.
    await asyncio.gather(*(ask(name) for name in names for _ in range(6)))
    assert taken == {0: 9, 1: 9}


async def test_the_prefill_node_is_the_earliest_with_what_others_gave_it(redis: Any) -> None:
    a, b = conductors(redis, "a", "b")
    await a.beat({})
    await b.beat({"p0@1": Load(0, 0.5)})
    booking = await a.book([P0, P1], [], 0, 0.3)
    assert (booking.prefill, booking.decode, booking.had_room) == (1, -1, True)
    # Its own work is in its own estimates already; for the other one it counts.
    assert (await a.book([P0, P1], [], 0, 0.3)).prefill == 1
    assert await b.beat({}) == (1, {"p1@1": Load(0, 0.6)})


async def test_a_conductor_that_is_gone_holds_nothing_back(redis: Any) -> None:
    (dead,) = conductors(redis, "dead")
    a, b = conductors(redis, "a", "b")
    await dead.beat({"d0@1": Load(10, 0.0)})
    await a.beat({})
    assert (await a.book([P0], [D0, D1], 3, 0.0)).decode == 1
    # As when its lease has run out by Redis's clock, however long the steps before took.
    now_s, now_us = await redis.time()
    left_ms = await redis.zscore("{test}:conductors", "dead") - now_s * 1000 - now_us / 1000
    assert 0 < left_ms <= 30_000
    assert await redis.zadd("{test}:conductors", {"dead": 1.0}, xx=True, ch=True) == 1
    assert (await b.beat({}))[0] == 1
    assert (await a.book([P0], [D0, D1], 3, 0.0)).decode == 0
    await a.leave()
    assert await b.beat({}) == (0, {})


async def test_numbers_keep_their_precision(redis: Any) -> None:
    a, b = conductors(redis, "a", "b")
    await a.beat({"p0@1": Load(123_456_789_012, 98_765.432101)})
    assert (await b.beat({}))[1] == {"p0@1": Load(123_456_789_012, 98_765.432101)}
