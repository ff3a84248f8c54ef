"""The probability that blocks of a kind are used again, by the time since their last use."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

# Ages in half octaves: an age's rate is within a factor of 1.2 of its neighbours'.
_EDGES = sorted({round(2 ** (half / 2)) for half in range(30)})
_NUM_AGES = len(_EDGES) + 1
_WIDTHS = np.diff([0, *_EDGES, 2 * _EDGES[-1]]).astype(np.float64)
# Below this many observed blocks, a kind is assumed to behave much like all blocks.
_FEW_BLOCKS = 32
# Smaller differences of worth are noise after some hundred requests.
_MIN_DIFFERENCE = 0.2


class LifeTable:
    """A life table for each kind of block, from observed uses and blocks still waiting for one.

    ``worth[kind][age]`` is the best rate of hits per tick and slot that keeping such a block promises: the
    maximum, over all times to keep it, of the probability of a hit divided by the expected time in the slot
    (Gittins' index), in steps of a fifth. Observations are forgotten with ``half_life`` ticks.
    """

    def __init__(self, num_kinds: int, half_life: float) -> None:
        self._keep = 0.5 ** (1 / half_life)
        self._used = [[0.0] * _NUM_AGES for _ in range(num_kinds)]
        self._censored = [[0.0] * _NUM_AGES for _ in range(num_kinds)]
        # Blocks by tick of last use.
        self._waiting: list[Counter[int]] = [Counter() for _ in range(num_kinds)]
        self.worth = [[0.0] * _NUM_AGES for _ in range(num_kinds)]

    @staticmethod
    def age(ticks: int) -> int:
        """The index into ``worth`` of a block last used this many ticks ago."""
        return bisect_right(_EDGES, ticks)

    def begin(self, kind: int, tick: int) -> None:
        """A block of this kind was used, and waits for its next use."""
        self._waiting[kind][tick] += 1

    def use(self, kind: int, since: int, tick: int) -> None:
        """A block that began at tick ``since`` is used again."""
        self._end(kind, since)
        self._used[kind][self.age(tick - since)] += 1

    def censor(self, kind: int, since: int, tick: int) -> None:
        """A block that began at tick ``since`` is not observed any more."""
        self._end(kind, since)
        self._censored[kind][self.age(tick - since)] += 1

    def _end(self, kind: int, since: int) -> None:
        waiting = self._waiting[kind]
        waiting[since] -= 1
        if not waiting[since]:
            del waiting[since]

    def learn(self, tick: int) -> None:
        used, censored = np.array(self._used), np.array(self._censored)
        if not used.any():
            return
        ended = used + censored
        for kind, waiting in enumerate(self._waiting):
            for since, count in waiting.items():
                ended[kind, self.age(tick - since)] += count
        at_risk = np.cumsum(ended[:, ::-1], axis=1)[:, ::-1]
        uses, ticks = _with_neighbours(used), _with_neighbours(at_risk * _WIDTHS)
        # Add one block that is never used again: without observations the chance is 0.
        of_all = uses.sum(axis=0) / (ticks.sum(axis=0) + _WIDTHS)
        few = _FEW_BLOCKS * _WIDTHS
        chances = np.minimum((uses + few * of_all) / (ticks + few + _WIDTHS) * _WIDTHS, 1.0)
        self.worth = _in_steps(_worth(chances)).tolist()
        self._used = (used * self._keep).tolist()
        self._censored = (censored * self._keep).tolist()


def _with_neighbours(counts: Floats) -> Floats:
    """Add half of the neighbouring ages' counts: the blocks of one request return together, so one age has
    too few independent cases."""
    summed = counts.copy()
    summed[:, 1:] += counts[:, :-1] / 2
    summed[:, :-1] += counts[:, 1:] / 2
    return summed


def _worth(chances: Floats) -> Floats:
    """The best ratio of hits to time from each age on; ``chances[k, a]``: of a use within age ``a`` once
    reached, for kind ``k``."""
    rests, widths = 1 - chances, _WIDTHS * (1 - chances / 2)
    worth = np.empty_like(chances)
    for first in range(_NUM_AGES):
        alive = np.cumprod(rests[:, first:], axis=1)
        alive[:, 1:] = alive[:, :-1]
        alive[:, 0] = 1.0
        hits = np.cumsum(alive * chances[:, first:], axis=1)
        ticks = np.cumsum(alive * widths[:, first:], axis=1)
        worth[:, first] = (hits / ticks).max(axis=1)
    return worth


def _in_steps(worth: Floats) -> Floats:
    steps = np.zeros_like(worth)
    known = worth > 0
    steps[known] = np.exp(np.round(np.log(worth[known]) / _MIN_DIFFERENCE) * _MIN_DIFFERENCE)
    return steps
