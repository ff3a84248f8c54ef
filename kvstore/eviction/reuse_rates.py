"""How likely blocks of a kind are to be used again, by how long ago they were used: learned from what
happens."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter

# Ages are told apart by half octaves: an age's rate is then known within a factor of 1.2 of its neighbours'.
_EDGES = sorted({round(2 ** (half / 2)) for half in range(30)})
_NUM_AGES = len(_EDGES) + 1
_WIDTHS = [upper - lower for lower, upper in zip([0, *_EDGES], [*_EDGES, 2 * _EDGES[-1]], strict=True)]


class ReuseRates:
    """A life table for each kind of block, from uses seen and blocks still waiting for one.

    ``worth(kind)[age]`` is the greatest rate of hits, in hits a tick for a slot, that keeping a block of this
    kind and age for some time yet promises: the best ratio, over all times to keep it, of the probability of
    a hit to the time it holds the slot (Gittins' index). Rates follow the load: what was seen is forgotten
    with ``half_life`` ticks.
    """

    def __init__(self, num_kinds: int, half_life: float) -> None:
        self._keep = 0.5 ** (1 / half_life)
        self._used = [[0.0] * _NUM_AGES for _ in range(num_kinds)]
        self._given_up = [[0.0] * _NUM_AGES for _ in range(num_kinds)]
        self._waiting: list[Counter[int]] = [
            Counter() for _ in range(num_kinds)
        ]  # blocks by tick of last use
        self.worth = [[0.0] * _NUM_AGES for _ in range(num_kinds)]

    @staticmethod
    def age(ticks: int) -> int:
        """The index into ``worth`` of a block last used so many ticks ago."""
        return bisect_right(_EDGES, ticks)

    def begin(self, kind: int, tick: int) -> None:
        """A block of this kind was used, and waits for its next use."""
        self._waiting[kind][tick] += 1

    def use(self, kind: int, since: int, tick: int) -> None:
        """A block that began at tick ``since`` is used again."""
        self._end(kind, since)
        self._used[kind][self.age(tick - since)] += 1

    def give_up(self, kind: int, since: int, tick: int) -> None:
        """A block that began at tick ``since`` is not looked out for any more."""
        self._end(kind, since)
        self._given_up[kind][self.age(tick - since)] += 1

    def _end(self, kind: int, since: int) -> None:
        waiting = self._waiting[kind]
        waiting[since] -= 1
        if not waiting[since]:
            del waiting[since]

    def learn(self, tick: int) -> None:
        """Bring ``worth`` up to date; to be called once a tick."""
        for kind, waiting in enumerate(self._waiting):
            if not any(self._used[kind]):
                continue  # no use of this kind was ever seen
            still = [0.0] * _NUM_AGES
            for since, count in waiting.items():
                still[self.age(tick - since)] += count
            used, given_up = self._used[kind], self._given_up[kind]
            chances = [0.0] * _NUM_AGES
            at_risk = (
                1.0  # one block that is never used again: nothing seen yet means no chance, not an even one
            )
            for age in reversed(range(_NUM_AGES)):
                at_risk += used[age] + given_up[age] + still[age]
                chances[age] = used[age] / at_risk
            self.worth[kind] = _worth(chances)
            self._used[kind] = [count * self._keep for count in used]
            self._given_up[kind] = [count * self._keep for count in given_up]


def _worth(chances: list[float]) -> list[float]:
    """The best ratio of hits to time from each age on; ``chances[a]``: of a use within age ``a``, once
    reached."""
    steps = [
        (chance, 1 - chance, width * (1 - chance / 2)) for chance, width in zip(chances, _WIDTHS, strict=True)
    ]
    worth = []
    for first in range(_NUM_AGES):
        alive, hits, ticks, best = 1.0, 0.0, 0.0, 0.0
        for chance, rest, width in steps[first:]:
            hits += alive * chance
            ticks += alive * width
            alive *= rest
            if hits > best * ticks:
                best = hits / ticks
        worth.append(best)
    return worth
