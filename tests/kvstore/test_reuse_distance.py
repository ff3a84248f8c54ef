"""Reuse distances say what an LRU cache would have hit."""

from __future__ import annotations

import random
from collections import OrderedDict
from hashlib import blake2b

import pytest

from moonpool.kvstore.blocks.keys import BlockKey
from moonpool.kvstore.eviction.reuse_distance import ReuseDistance


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


def lru_hits(uses: list[int], capacity: int) -> int:
    cache: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for number in uses:
        hits += number in cache
        cache[number] = None
        cache.move_to_end(number)
        if len(cache) > capacity:
            cache.popitem(last=False)
    return hits


@pytest.mark.slow
@pytest.mark.parametrize("max_watched", [8192, 1 << 20])
def test_the_share_below_a_size_is_the_hit_rate_of_an_lru_cache_of_it(max_watched: int) -> None:
    rng, seen = random.Random(3), Seen()
    reuse = ReuseDistance(seen, seen, max_watched=max_watched)
    uses = [int(rng.expovariate(1 / 5_000)) for _ in range(150_000)]
    for number in uses:
        reuse.use([key(number)])
    ratios = dict(reuse.hit_ratios())
    # Watching everything is exact; watching so many is off by about a hundredth, as in the paper.
    assert (reuse.rate == 1) == (max_watched > 8192)
    off = 1e-9 if reuse.rate == 1 else 0.02
    for capacity in (512, 2048, 8192, 1 << 20):
        assert ratios[capacity] == pytest.approx(lru_hits(uses, capacity) / len(uses), abs=off)
    # What is exported says the same of what was watched since the rate last changed.
    assert len(seen.distances) + seen.num_first <= len(uses)


def test_a_chain_is_no_further_away_than_its_first_block() -> None:
    seen = Seen()
    reuse = ReuseDistance(seen, seen)
    chain = [key(number) for number in range(100)]
    reuse.use(chain)
    assert dict(reuse.hit_ratios())[1 << 20] == 0
    reuse.use(chain)
    # Leaves go first: a cache of 64 blocks still has the first 64 of them.
    assert dict(reuse.hit_ratios())[64] == pytest.approx(64 / 200)
    assert dict(reuse.hit_ratios())[128] == pytest.approx(100 / 200)


def test_what_is_watched_is_bounded() -> None:
    seen = Seen()
    reuse = ReuseDistance(seen, seen, max_watched=10)
    for number in range(3000):
        reuse.use([key(number)])
        assert len(reuse._last) == len(reuse._times) <= 10
    assert seen.distances == []
    assert dict(reuse.hit_ratios())[1 << 20] < 0.3
    assert reuse.rate >= 128


def test_nothing_used_is_nothing_said() -> None:
    assert ReuseDistance(Seen(), Seen()).hit_ratios() == []
