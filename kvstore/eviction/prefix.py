"""The default policy: evict the block with the least valuable slot, as learned from past uses."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import ClassVar

from moonpool.kvstore.eviction.life_table import LifeTable
from moonpool.kvstore.eviction.savings import SavedSeconds

# Requests between updates of the rates, and the half life of observations: many more than fill a table of
# rates, few enough to follow the load of an hour.
_LEARN_REQUESTS = 16
_HALF_LIFE_REQUESTS = 4096
# Keys remembered per slot, so that blocks that return late are recognised.
_REMEMBERED = 16
_MAX_USES = 4
# Blocks of capacity to each request of a tick: with ten new blocks a request, a block then stays 50 ticks.
_TICK_BLOCKS = 512
_MAX_TICK_REQUESTS = 16
# Savings are distinguished by half octaves.
_PRICE_STEP = math.sqrt(2)

Group = tuple[int, int, int]  # kind, tick of last use, price


@dataclass(slots=True)
class _Seen:
    """What is remembered of a block, in the tier or not."""

    kind: int
    tick: int
    uses: int
    price: int

    @property
    def group(self) -> Group:
        return (self.kind, self.tick, self.price)


class Prefix:
    """Group blocks by kind: number of uses, and for blocks used once, their position in the request.

    ``LifeTable`` learns the hits a slot gives by kind and age; times the seconds a hit saves, that is a
    block's worth. The leaf of least worth is evicted; a new block worth less than the victim is not admitted,
    so a long document read once does not displace conversations. Without observations this is LRU.
    """

    num_kinds: ClassVar[int] = 25 + _MAX_USES

    def __init__(self, capacity_blocks: int, saved_s: SavedSeconds | None = None) -> None:
        """``saved_s``: see ``savings``; evaluated again regularly. None: every hit saves the same."""
        self._saved_s = saved_s
        self._prices: list[int] = []  # by position, as they are now
        self._rates = LifeTable(self.num_kinds, _HALF_LIFE_REQUESTS / _LEARN_REQUESTS)
        # Requests to a tick, the clock of ages: fine against the time a block stays.
        self._tick_requests = min(max(capacity_blocks // _TICK_BLOCKS, 1), _MAX_TICK_REQUESTS)
        self._max_seen = max(_REMEMBERED * capacity_blocks, 4096)
        # Least recently seen first, but for held ones: when they come to be forgotten, they go to the end.
        self._seen: OrderedDict[Hashable, _Seen] = OrderedDict()
        self._requests = 0
        self._tick = 0
        self._chain: dict[Hashable, Hashable | None] = {}  # of the request: a key and the one before it
        self._parents: dict[Hashable, Hashable | None] = {}  # of held blocks
        self._num_children: dict[Hashable, int] = {}  # of held blocks
        # Held leaves by group, in order of use; and the groups by worth and tick, some out of date.
        self._leaves: dict[Group, OrderedDict[Hashable, None]] = {}
        self._shown: dict[Hashable, Group] = {}  # the group each leaf is in
        self._heap: list[tuple[float, int, Group]] = []

    def used(self, chain: Sequence[Hashable], num_held: int) -> None:
        self._advance()
        seen = self._seen
        num_known = next((i for i, key in enumerate(chain) if key not in seen), len(chain))
        self._chain = dict(zip(chain, [None, *chain], strict=False))
        leaves = [key for key in chain if key in self._shown]
        for key in leaves:
            self._hide(key)
        # In reverse, so that a leaf is older than its predecessors.
        for position in reversed(range(len(chain))):
            self._see(chain[position], position, num_known, len(chain))
        for key in leaves:
            self._show(key)
        while len(seen) > max(self._max_seen, len(self._parents)):
            key, old = seen.popitem(last=False)
            if key in self._parents:
                seen[key] = old
            else:
                self._rates.censor(old.kind, old.tick, self._tick)

    def _advance(self) -> None:
        self._requests += 1
        if self._requests % _LEARN_REQUESTS == 0:
            self._rates.learn(self._tick)
            self._prices.clear()
        if self._requests % self._tick_requests == 0:
            self._tick += 1
            self._heap = [self._ranked(group) for group in self._leaves]
            heapify(self._heap)

    def _see(self, key: Hashable, position: int, num_known: int, length: int) -> None:
        """Remember a use of the block, which is in no group of leaves now."""
        known = self._seen.get(key)
        uses = 0
        if known is not None:
            self._rates.use(known.kind, known.tick, self._tick)
            uses = known.uses + 1
        kind, price = self.kind(uses, position, num_known, length), self._price(position)
        self._rates.begin(kind, self._tick)
        if known is None:
            self._seen[key] = _Seen(kind, self._tick, uses, price)
        else:
            known.kind, known.tick, known.uses, known.price = kind, self._tick, uses, price
            self._seen.move_to_end(key)

    def kind(self, uses: int, position: int, num_known: int, length: int) -> int:
        """Classify a block by what predicts its reuse.

        A block seen before: the number of uses. A new one: whether it is the request's last block (mostly a
        partial prompt, never seen again), its depth in the chain, how many new blocks the request brought,
        and whether it continues a known chain.
        """
        if uses:
            return 24 + min(uses, _MAX_USES)
        if position == length - 1:
            return 0
        num_new = length - num_known
        depth = min(max(position.bit_length() - 3, 0), 3)
        size = 0 if num_new <= 3 else 1 if num_new < 64 else 2
        return 1 + depth + 4 * size + 12 * (num_known > 3)

    def _price(self, position: int) -> int:
        """What a hit at ``position`` saves relative to the first position, as a power of ``_PRICE_STEP``.
        Relative, because measured rates change over time."""
        if self._saved_s is None:
            return 0
        if position >= len(self._prices):
            first_s = self._saved_s(0)
            more = range(len(self._prices), position + 1)
            self._prices += [round(math.log(self._saved_s(at) / first_s, _PRICE_STEP)) for at in more]
        return self._prices[position]

    def admits(self, key: Hashable) -> bool:
        known = self._seen.get(key)
        kind, price = (self.kind(0, 0, 0, 1), self._price(0)) if known is None else (known.kind, known.price)
        while self._heap:
            worth, _, group = self._heap[0]
            if self._leaves.get(group):
                return self._rates.worth[kind][0] * _PRICE_STEP**price >= worth
            heappop(self._heap)
        return True

    def added(self, key: Hashable) -> None:
        if key not in self._seen:
            self._see(key, 0, 0, 1)
        parent = self._chain.get(key)
        if parent not in self._parents:
            parent = None
        if parent is not None:
            if not self._num_children[parent]:
                self._hide(parent)
            self._num_children[parent] += 1
        self._parents[key] = parent
        self._num_children[key] = 0
        self._show(key)

    def removed(self, key: Hashable) -> None:
        if not self._num_children.pop(key):
            self._hide(key)
        parent = self._parents.pop(key)
        if parent is not None and parent in self._parents:
            self._num_children[parent] -= 1
            if not self._num_children[parent]:
                self._show(parent)

    def victim(self, can_go: Callable[[Hashable], bool]) -> Hashable | None:
        passed = []
        found: Hashable | None = None
        while self._heap and found is None:
            found = next(filter(can_go, self._leaves.get(self._heap[0][2], ())), None)
            if found is None:
                passed.append(heappop(self._heap))
        for entry in passed:
            if entry[2] in self._leaves:
                heappush(self._heap, entry)
        if found is None:
            # Blocks above pinned ones, or added without their chain, are in no group.
            found = next(filter(can_go, self._parents), None)
        return found

    def _ranked(self, group: Group) -> tuple[float, int, Group]:
        kind, tick, price = group
        hits = self._rates.worth[kind][self._rates.age(self._tick - tick)]
        return (hits * _PRICE_STEP**price, tick, group)

    def _show(self, key: Hashable) -> None:
        group = self._shown[key] = self._seen[key].group
        leaves = self._leaves.get(group)
        if leaves is None:
            leaves = self._leaves[group] = OrderedDict()
            heappush(self._heap, self._ranked(group))
        leaves[key] = None

    def _hide(self, key: Hashable) -> None:
        group = self._shown.pop(key)
        leaves = self._leaves[group]
        del leaves[key]
        if not leaves:
            del self._leaves[group]
