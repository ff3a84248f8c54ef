"""LRU eviction."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence


class Lru:
    """Evict the least recently used block; of one chain, the last block first."""

    def __init__(self, capacity_blocks: int) -> None:
        self._order: OrderedDict[Hashable, None] = OrderedDict()  # oldest first

    def used(self, chain: Sequence[Hashable], num_held: int) -> None:
        # In reverse order, so that a block is always older than its predecessors in the chain.
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
