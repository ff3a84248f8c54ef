"""Reuse distances of blocks: the hit rate of a larger or smaller cache.

A sample of keys is watched with every use, so that distances within it are true ones on a smaller scale; the
sample is halved when it grows too large. This is SHARDS with a fixed number of samples (Waldspurger et al.,
"Efficient MRC Construction with SHARDS", FAST 2015), with their correction for the expected number of uses
(SHARDS-adj).
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from itertools import accumulate

from prometheus_client import Counter, Histogram

from moonpool.kvstore.blocks.keys import BlockKey

# Cache sizes in blocks.
CAPACITIES = tuple(1 << power for power in range(4, 29))
# The smallest sample: two bytes of a key decide.
_MAX_RATE = 1 << 16


class ReuseDistance:
    """The number of different blocks used between two uses of one: the smallest LRU cache that hits.

    The share of uses below N (first uses count as misses) is the hit rate of an LRU cache of N blocks. Costs
    a few microseconds a request and about 200 bytes a watched block.
    """

    def __init__(self, distances: Histogram, first_uses: Counter, *, max_watched: int = 8192) -> None:
        """``distances`` gets distances in blocks; ``first_uses`` counts watched blocks never seen before. One
        use in ``rate`` is watched."""
        self.rate = 1
        self.num_uses = 0  # of all blocks
        self._distances = distances
        self._first_uses = first_uses
        self._max_watched = max_watched
        self._last: OrderedDict[BlockKey, int] = OrderedDict()  # time of the last use, oldest first
        self._times: list[int] = []  # the same times, sorted
        self._now = 0
        # Uses by the smallest capacity that hits them, each counting for as many as are not watched.
        self._reached = [0] * (len(CAPACITIES) + 1)
        self._sampled = 0  # all uses, counted in the same way

    def use(self, chain: Sequence[BlockKey]) -> None:
        """A request uses these blocks at once; the last counts as used first, because caches evict leaves
        first."""
        low, high = self._masks()
        self.num_uses += len(chain)
        watched = [key for key in reversed(chain) if not key[-1] & low and not key[-2] & high]
        for key in watched:
            self._measure(key)
        for key in watched:
            self._touch(key)
        while len(self._last) > self._max_watched:
            self._watch_fewer()

    def hit_ratios(self) -> list[tuple[int, float]]:
        """For each cache size the share of all uses it would have hit; empty before the first use."""
        if not self.num_uses:
            return []
        # The sample may miss or overcount hot blocks; their distances are short.
        by_chance = self.num_uses - self._sampled
        hits = accumulate(self._reached[:-1], initial=by_chance)
        next(hits)
        ratios = (min(max(count / self.num_uses, 0.0), 1.0) for count in hits)
        return list(zip(CAPACITIES, ratios, strict=True))

    def _masks(self) -> tuple[int, int]:
        """Bits of a key's last two bytes that are zero in watched keys."""
        return min(self.rate, 256) - 1, max(self.rate // 256, 1) - 1

    def _measure(self, key: BlockKey) -> None:
        self._sampled += self.rate
        before = self._last.get(key)
        if before is None:
            self._first_uses.inc()
            self._reached[-1] += self.rate
            return
        distance = self.rate * (len(self._times) - bisect_right(self._times, before) + 1)
        self._distances.observe(distance)
        self._reached[_position(distance)] += self.rate

    def _touch(self, key: BlockKey) -> None:
        self._now += 1
        before = self._last.pop(key, None)
        if before is not None:
            del self._times[bisect_right(self._times, before) - 1]
        self._last[key] = self._now
        self._times.append(self._now)

    def _watch_fewer(self) -> None:
        if self.rate == _MAX_RATE:
            self._last.popitem(last=False)
            del self._times[0]
            return
        self.rate *= 2
        low, high = self._masks()
        kept = [(key, time) for key, time in self._last.items() if not key[-1] & low and not key[-2] & high]
        self._last = OrderedDict(kept)
        self._times = [time for _, time in kept]


def _position(distance: int) -> int:
    """The index of the smallest capacity that holds ``distance`` blocks."""
    smallest = CAPACITIES[0].bit_length() - 1
    return min(max((distance - 1).bit_length() - smallest, 0), len(CAPACITIES) - 1)
