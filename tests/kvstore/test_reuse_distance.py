"""Reuse distances say what an LRU cache would have hit."""

from __future__ import annotations

import random
from collections import OrderedDict
from hashlib import blake2b

import pytest

from kvstore.keys import BlockKey
from kvstore.reuse_distance import SAMPLE, ReuseDistance


class Seen:
    def __init__(self) -> None:
        self.distances: list[float] = []
        self.num_first = 0

    def observe(self, amount: float) -> None:
        self.distances.append(amount)

    def inc(self) -> None:
        self.num_first += 1


def key(number: int) -> BlockKey:
    return BlockKey(blake2b(number.to_bytes(8, "big"), digest_size=16).digest())


def test_the_share_below_a_size_is_the_hit_rate_of_an_lru_cache_of_it() -> None:
    rng, seen = random.Random(3), Seen()
    reuse = ReuseDistance(seen, seen)
    uses = [int(rng.expovariate(1 / 5_000)) for _ in range(150_000)]
    for number in uses:
        reuse.use([key(number)])
    for capacity in (500, 2_000, 8_000):
        cache: OrderedDict[int, None] = OrderedDict()
        hits = 0
        for number in uses:
            hits += number in cache
            cache[number] = None
            cache.move_to_end(number)
            if len(cache) > capacity:
                cache.popitem(last=False)
        watched = len(seen.distances) + seen.num_first
        estimate = sum(distance <= capacity for distance in seen.distances) / watched
        # The most popular blocks are a few: whether they are among the watched is luck, so compare misses.
        misses = sum(distance > capacity for distance in seen.distances) + seen.num_first
        assert SAMPLE * misses == pytest.approx(len(uses) - hits, rel=0.1)
        assert 0 < estimate < 1


def test_what_is_watched_is_bounded() -> None:
    seen = Seen()
    reuse = ReuseDistance(seen, seen, max_watched=10)
    for number in range(2000):
        reuse.use([key(number)])
    assert len(reuse._last) == len(reuse._times) == 10
    assert seen.distances == []
