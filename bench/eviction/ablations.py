"""What more knowledge would be worth: what stands between the policies and the optimum."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Container, Hashable, Iterator, Sequence
from typing import ClassVar

from moonpool.bench.eviction.replay import Request, replay_with
from moonpool.kvstore.eviction.life_table import LifeTable
from moonpool.kvstore.eviction.lru import Lru
from moonpool.kvstore.eviction.prefix import Prefix

_SHARES = (0.25, 0.5, 0.75)
_WRONG = (0.3, 0.25, 0.2, 0.15, 0.1)
# A block of more requests than this is of a prompt that all begin with.
_SHARED = 20


def fates_of(requests: Sequence[Request]) -> list[list[bool]]:
    """Return whether each block of each request is used again later."""
    later: set[int] = set()
    found: list[list[bool]] = []
    for blocks in reversed(requests):
        found.append([block in later for block in blocks])
        later.update(blocks)
    return found[::-1]


class Told(Lru):
    """LRU that is told of some requests which of their blocks are used again, but not when.

    Those that are not leave first, and are not added to a full cache.
    """

    def __init__(
        self,
        fates: Sequence[Sequence[bool]],
        shared: Container[Hashable],
        *,
        share: float = 1.0,
        wrong: float = 0.0,
    ) -> None:
        """``share``: of the requests that it is told of; ``wrong``: of those for which the opposite is said
        of all blocks but the ``shared`` ones, which are certain. Both are drawn at random."""
        super().__init__(0)
        self._fates = iter(fates)
        self._shared, self._share, self._wrong = shared, share, wrong
        self._rng = random.Random(1)
        self._doomed: set[Hashable] = set()

    def used(self, chain: Sequence[Hashable], num_held: int) -> None:
        super().used(chain, num_held)
        self._doomed.difference_update(chain)
        told, flipped = self._rng.random() < self._share, self._rng.random() < self._wrong
        # In order, so that the last of a chain leaves first.
        for key, returns in zip(chain, next(self._fates), strict=True):
            if told and returns == (flipped and key not in self._shared):
                self._doom(key)

    def _doom(self, key: Hashable) -> None:
        self._doomed.add(key)
        if key in self._order:
            self._order.move_to_end(key, last=False)

    def admits(self, key: Hashable) -> bool:
        return key not in self._doomed

    def added(self, key: Hashable) -> None:
        super().added(key)
        if key in self._doomed:
            self._doom(key)


class _Rates(LifeTable):
    """Rates that were learned before, and stay."""

    def learn(self, tick: int) -> None:
        pass


class Fine(Prefix):
    """``prefix`` with some thousand kinds: by all that it knows of a block and its request, in fine steps."""

    num_kinds: ClassVar[int] = 8 * 8 * 12 * 2 * 2

    def kind(self, uses: int, position: int, num_known: int, length: int) -> int:
        numbers = (
            (min(uses, 7), 8),
            (position.bit_length(), 8),
            ((length - num_known).bit_length(), 12),
            (int(num_known > 3), 2),
            (int(position == length - 1), 2),
        )
        kind = 0
        for number, size in numbers:
            kind = kind * size + min(number, size - 1)
        return kind


def _hindsight(requests: Sequence[Request], policy: type[Prefix], capacity: int) -> float:
    """The hit rate with the rates of the whole trace from its first request on."""
    before = policy(capacity)
    before._rates = LifeTable(policy.num_kinds, 1e12)
    replay_with(requests, before, capacity)
    after = policy(capacity)
    after._rates = _Rates(policy.num_kinds, 1e12)
    after._rates.worth = before._rates.worth
    return replay_with(requests, after, capacity).hit_rate


def ablations(requests: Sequence[Request], capacity: int) -> Iterator[tuple[str, float]]:
    """Yield name and hit rate of each variant."""
    yield "prefix, rates known beforehand", _hindsight(requests, Prefix, capacity)
    yield f"the same with {Fine.num_kinds:,} kinds", _hindsight(requests, Fine, capacity)
    fates = fates_of(requests)
    counts = Counter(block for blocks in requests for block in blocks)
    shared = {block for block, count in counts.items() if count > _SHARED}
    for share in _SHARES:
        told = Told(fates, shared, share=share)
        yield f"lru, told which blocks return of {share:.0%}", replay_with(requests, told, capacity).hit_rate
    for wrong in (*_WRONG, 0.0):
        told = Told(fates, shared, wrong=wrong)
        name = f"lru, told which blocks return, {wrong:.0%} of requests wrong"
        yield name, replay_with(requests, told, capacity).hit_rate
