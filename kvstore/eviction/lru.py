"""LRU and the queue policies: SIEVE and S3-FIFO."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence


class Lru:
    """The block unused for longest goes first; of a chain, its end."""

    def __init__(self, capacity_blocks: int) -> None:
        self._order: OrderedDict[Hashable, None] = OrderedDict()  # oldest first

    def used(self, chain: Sequence[Hashable], num_held: int) -> None:
        # From the last to the first: a block is then always older than what comes before it in its chain.
        for key in reversed(chain[:num_held]):
            if key in self._order:
                self._order.move_to_end(key)

    def admits(self, key: Hashable) -> bool:
        return True

    def added(self, key: Hashable) -> None:
        self._order[key] = None

    def removed(self, key: Hashable) -> None:
        del self._order[key]

    def victim(self, can_go: Callable[[Hashable], bool]) -> Hashable | None:
        return next(filter(can_go, self._order), None)


class Sieve:
    """A queue in order of arrival and a hand that goes from old to new: it spares, once, what was used since
    it last came by. (Zhang et al., NSDI 2024.)"""

    def __init__(self, capacity_blocks: int) -> None:
        self._order: OrderedDict[Hashable, bool] = OrderedDict()  # oldest first; value: used since
        self._hand: list[Hashable] = []  # what the hand has before it, next one last

    def used(self, chain: Sequence[Hashable], num_held: int) -> None:
        for key in chain[:num_held]:
            if key in self._order:
                self._order[key] = True

    def admits(self, key: Hashable) -> bool:
        return True

    def added(self, key: Hashable) -> None:
        self._order[key] = False

    def removed(self, key: Hashable) -> None:
        del self._order[key]

    def victim(self, can_go: Callable[[Hashable], bool]) -> Hashable | None:
        rounds = 0
        while rounds < 3:
            while self._hand:
                key = self._hand[-1]
                used = self._order.get(key)
                if used is False and can_go(key):
                    return key
                if used:
                    self._order[key] = False
                self._hand.pop()
            # The hand is past the newest: it begins again at the oldest.
            self._hand = list(reversed(self._order))
            rounds += 1
        return None


class S3Fifo:
    """New blocks pass through a small queue; those used there, or remembered from having been there lately,
    go on to the main one. (Yang et al., SOSP 2023: a tenth for the small queue, as many names remembered as
    the main one has blocks.)"""

    def __init__(self, capacity_blocks: int) -> None:
        self._small: OrderedDict[Hashable, None] = OrderedDict()
        self._main: OrderedDict[Hashable, None] = OrderedDict()
        self._uses: dict[Hashable, int] = {}
        self._ghosts: OrderedDict[Hashable, None] = OrderedDict()
        self._small_size = max(capacity_blocks // 10, 1)
        self._num_ghosts = max(capacity_blocks - self._small_size, 1)

    def used(self, chain: Sequence[Hashable], num_held: int) -> None:
        for key in chain[:num_held]:
            if key in self._uses:
                self._uses[key] = min(self._uses[key] + 1, 3)

    def admits(self, key: Hashable) -> bool:
        return True

    def added(self, key: Hashable) -> None:
        self._uses[key] = 0
        if key in self._ghosts:
            del self._ghosts[key]
            self._main[key] = None
        else:
            self._small[key] = None

    def removed(self, key: Hashable) -> None:
        del self._uses[key]
        if key in self._main:
            del self._main[key]
            return
        del self._small[key]
        self._ghosts[key] = None
        if len(self._ghosts) > self._num_ghosts:
            self._ghosts.popitem(last=False)

    def victim(self, can_go: Callable[[Hashable], bool]) -> Hashable | None:
        from_small = len(self._small) > self._small_size or not self._main
        first, second = (self._small, self._main) if from_small else (self._main, self._small)
        return self._pass(first, can_go) or self._pass(second, can_go)

    def _pass(
        self, queue: OrderedDict[Hashable, None], can_go: Callable[[Hashable], bool]
    ) -> Hashable | None:
        """Go through a queue from its old end, moving on what was used. Four rounds end it: uses count to
        3."""
        for _ in range(4 * len(queue)):
            key = next(iter(queue), None)
            if key is None:
                return None
            if self._uses[key] and queue is self._small:
                del queue[key]
                self._main[key] = None
                self._uses[key] = 0
            elif not self._uses[key] and can_go(key):
                return key
            else:
                self._uses[key] = max(self._uses[key] - 1, 0)
                queue.move_to_end(key)
        return None
