"""Eviction policies that are compared with those of the product: LFU, and Mooncake's length-aware policy."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from heapq import heapify, heappop, heappush
from itertools import count

from moonpool.kvstore.eviction import POLICIES, EvictionPolicy


class _Ranked(ABC):
    """Evict the block of the lowest rank first. Ranks change only when a block is used."""

    def __init__(self, capacity_blocks: int) -> None:
        self._ranks: dict[Hashable, tuple[int, int, int]] = {}
        # Entries of older ranks stay until they reach the top.
        self._heap: list[tuple[tuple[int, int, int], int, Hashable]] = []
        self._clock = count()
        self._positions: dict[Hashable, int] = {}  # of the chain in use

    @abstractmethod
    def _rank(self, uses: int, position: int, now: int) -> tuple[int, int, int]:
        """Return the block's rank; its first item is ``uses``."""

    def used(self, chain: Sequence[Hashable], num_held: int) -> None:
        self._positions = {key: position for position, key in enumerate(chain)}
        for position, key in enumerate(chain[:num_held]):
            if key in self._ranks:
                self._set(key, self._ranks[key][0] + 1, position)

    def admits(self, key: Hashable) -> bool:
        return True

    def added(self, key: Hashable) -> None:
        self._set(key, 1, self._positions.get(key, 0))

    def removed(self, key: Hashable) -> None:
        del self._ranks[key]

    def victim(self, can_go: Callable[[Hashable], bool]) -> Hashable | None:
        passed = []
        found: Hashable | None = None
        while self._heap and found is None:
            entry = self._heap[0]
            if self._ranks.get(entry[2]) != entry[0]:
                heappop(self._heap)
            elif can_go(entry[2]):
                found = entry[2]
            else:
                passed.append(heappop(self._heap))
        for entry in passed:
            heappush(self._heap, entry)
        return found

    def _set(self, key: Hashable, uses: int, position: int) -> None:
        now = next(self._clock)
        rank = self._ranks[key] = self._rank(uses, position, now)
        heappush(self._heap, (rank, now, key))
        if len(self._heap) > 4 * len(self._ranks) + 1024:
            self._heap = [entry for entry in self._heap if self._ranks.get(entry[2]) == entry[0]]
            heapify(self._heap)


class Lfu(_Ranked):
    """Evict the block with the fewest uses since it was added; among equals, the least recently used."""

    def _rank(self, uses: int, position: int, now: int) -> tuple[int, int, int]:
        return (uses, now, 0)


class LengthAware(_Ranked):
    """Evict, of the blocks with the fewest uses, the one furthest from the start of its chain (Mooncake)."""

    def _rank(self, uses: int, position: int, now: int) -> tuple[int, int, int]:
        return (uses, -position, now)


CONTENDERS: dict[str, Callable[[int], EvictionPolicy]] = {**POLICIES, "lfu": Lfu, "length-aware": LengthAware}
