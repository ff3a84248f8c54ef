"""How far apart the uses of a block are: what a larger or a smaller cache would have hit."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol

from kvstore.keys import BlockKey

# One block in so many is watched, by its key: every use of it, so that its distances are true.
SAMPLE = 16


class Histogram(Protocol):
    def observe(self, amount: float, /) -> object: ...


class Counter(Protocol):
    def inc(self) -> object: ...


class ReuseDistance:
    """Different blocks used between two uses of one: the smallest LRU cache in which the second is a hit.

    So the share of uses below N (first ones count as beyond all) is the hit rate of an LRU cache of N blocks.
    A few microseconds a request; about 200 bytes a watched block, the one unused for longest forgotten first.
    """

    def __init__(self, distances: Histogram, first_uses: Counter, *, max_watched: int = 1 << 16) -> None:
        """``distances`` gets blocks; ``first_uses`` counts watched blocks never seen before, or forgotten."""
        self._distances = distances
        self._first_uses = first_uses
        self._max_watched = max_watched
        self._last: OrderedDict[BlockKey, int] = OrderedDict()  # time of the last use, oldest first
        self._times: list[int] = []  # the same times, sorted
        self._now = 0

    def use(self, chain: Sequence[BlockKey]) -> None:
        """A request uses these blocks, the last first: a block then is never further away than its parent."""
        for key in reversed(chain):
            if key[-1] % SAMPLE:
                continue
            self._now += 1
            before = self._last.pop(key, None)
            if before is None:
                self._first_uses.inc()
            else:
                place = bisect_right(self._times, before)
                self._distances.observe(SAMPLE * (len(self._times) - place + 1))
                del self._times[place - 1]
            self._last[key] = self._now
            insort(self._times, self._now)
        while len(self._last) > self._max_watched:
            self._last.popitem(last=False)
            del self._times[0]
