"""The blocks and slots of a tier, and the choice of what to evict: bookkeeping shared by all tiers.

As far as it can know, a tier has a prefix of each chain: blocks are evicted from the end, and a block removed
for another reason takes its descendants along. The first blocks may be in a faster tier and be added later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from itertools import takewhile
from typing import Generic, TypeVar

from moonpool.kvstore.eviction.kept_blocks import KeptBlocks
from moonpool.kvstore.eviction.policy import EvictionPolicy
from moonpool.kvstore.eviction.surplus_copies import SurplusCopies, unshared_end

Key = TypeVar("Key", bound=Hashable)


class ChainCache(Generic[Key]):
    """Slots ``0 … capacity-1``.

    ``on_evicted(key, slot)`` is called before the slot is reused, its bytes still there. ``num_spare`` slots
    stay free, so that an evicted block's slot is not reused at once: the slot free for longest is. Unused
    copies in ``surplus`` are evicted before the policy is asked, blocks in ``kept`` only where no other can
    go.
    """

    def __init__(
        self,
        capacity: int,
        policy: EvictionPolicy,
        *,
        on_evicted: Callable[[Key, int], None] | None = None,
        num_spare: int = 0,
    ) -> None:
        self.capacity = capacity
        self.num_spare = num_spare
        self.policy = policy
        self.on_evicted = on_evicted
        self.surplus: SurplusCopies[Key] = SurplusCopies()
        self.kept: KeptBlocks[Key] = KeptBlocks()
        self.num_evictions = 0
        self.num_refusals = 0  # blocks refused because every block is pinned
        self._slots: dict[Key, int] = {}
        self._free = deque(range(capacity))
        self._parents: dict[Key, Key] = {}
        self._children: dict[Key, set[Key]] = {}  # by parent, which may not be here
        self._pins: dict[int, int] = {}  # by slot
        self._removed_while_pinned: set[int] = set()  # their slots go free with the last pin
        self._reserved: set[int] = set()  # for blocks that are not visible yet
        self._retired: set[int] = set()  # bad: not used again

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, key: object) -> bool:
        return key in self._slots

    @property
    def num_free(self) -> int:
        """Free slots without the spare ones."""
        return max(len(self._free) - self.num_spare, 0)

    @property
    def num_pinned(self) -> int:
        return len(self._pins)

    def is_pinned(self, slot: int) -> bool:
        return slot in self._pins

    def keys(self) -> Iterable[Key]:
        return self._slots.keys()

    def slot_of(self, key: Key) -> int | None:
        return self._slots.get(key)

    def match(self, keys: Sequence[Key]) -> list[int]:
        """Slots of the longest prefix of ``keys`` that is here. Neither pins nor counts as a use."""
        found: list[int] = []
        for key in keys:
            slot = self._slots.get(key)
            if slot is None:
                break
            found.append(slot)
        return found

    def use(self, keys: Sequence[Key]) -> int:
        """A request uses this chain: inform the policy. Returns how many of its first blocks are here."""
        num_held = end = len(self.match(keys))
        for position in range(len(keys) - 1, num_held, -1):
            if keys[position] in self._slots:
                end = position + 1
                break
        self.policy.used(keys, end)
        if self.surplus:
            self.surplus.use(keys[:end])
        return num_held

    def add(self, key: Key, parent: Key | None) -> int | None:
        """Add a block after ``parent`` in its chain (None: the first), evicting to make room. Returns its
        slot.

        None: every block is pinned, or the policy does not admit it. Then its descendants here are evicted,
        because they cannot be reached.
        """
        assert key not in self._slots
        slot = self.reserve(key, parent)
        if slot is not None:
            self.commit(slot, key, parent)
        return slot

    def reserve(
        self, key: Key, parent: Key | None, *, held_elsewhere: bool = False, wanted: bool = False
    ) -> int | None:
        """``add`` in two steps: the block is not visible until ``commit``; ``abandon`` gives the slot back.

        None as for ``add``; but descendants of a block that is ``held_elsewhere``, in another tier, stay. For
        one that is ``wanted`` the policy is not asked: a request waits for it.
        """
        if not self.num_free and not self._make_room(key, parent, wanted):
            for after in () if held_elsewhere else self.after(key):
                self._evict(after)
            return None
        slot = self._free.popleft()
        self._reserved.add(slot)
        return slot

    def commit(self, slot: int, key: Key, parent: Key | None) -> int:
        """Make a reserved slot's block visible. Returns the slot that has it: another one if the same block
        was added meanwhile; ``slot`` is free then."""
        held = self._slots.get(key)
        if held is not None:
            self.abandon(slot)
            return held
        self._reserved.remove(slot)
        self._link(key, parent, slot)
        return slot

    def _link(self, key: Key, parent: Key | None, slot: int) -> None:
        self._slots[key] = slot
        if parent is not None:
            self._parents[key] = parent
            self._children.setdefault(parent, set()).add(key)
        self.policy.added(key)

    def abandon(self, slot: int) -> None:
        self._reserved.remove(slot)
        self._give_back(slot)

    def grow(self, num_slots: int) -> None:
        first = self.capacity
        self.capacity += num_slots
        self._free.extend(range(first, self.capacity))

    def adopt(self, blocks: Iterable[tuple[Key, Key | None, int]]) -> None:
        """Add blocks (key, parent, slot) that are in free slots already, the least recently used first."""
        taken = set()
        for key, parent, slot in blocks:
            self._link(key, parent, slot)
            taken.add(slot)
        self._free = deque(slot for slot in self._free if slot not in taken)

    def retire(self, slot: int) -> None:
        """Never use a slot again, once it is free."""
        self._retired.add(slot)
        if slot in self._free:
            self._free.remove(slot)

    def _give_back(self, slot: int) -> None:
        if slot not in self._retired:
            self._free.append(slot)

    def _make_room(self, key: Key, parent: Key | None, wanted: bool) -> bool:
        if not wanted and not self.policy.admits(key):
            return False
        # Pinned, so that the chain is not evicted to make room for its own end.
        above: list[int] = []
        if parent is not None:
            above += takewhile(lambda slot: slot not in self._pins, self._walk(parent))
        self.pin(above)
        try:
            # The slot of an evicted block that is pinned becomes free later.
            while not self.num_free:
                if not self.evict():
                    return False
            return True
        finally:
            self.unpin(above)

    def _walk(self, key: Key) -> Iterator[int]:
        here: Key | None = key
        while here is not None and (slot := self._slots.get(here)) is not None:
            yield slot
            here = self._parents.get(here)

    def lineage(self, key: Key) -> list[int]:
        """Slots of a block and of its predecessors here without a gap, the block's own first."""
        return list(self._walk(key))

    def is_shared(self, key: Key, successor: Key | None) -> bool:
        """Whether the chain goes on here after a block otherwise than with ``successor``."""
        return bool(self._children.get(key, set()) - {successor})

    def let_go(self, chain: Sequence[Key]) -> int:
        """Evict the end of ``chain`` before all others, as far as no other chain shares it, unless a request
        uses it again. Returns how many blocks of it are here."""
        end = [key for key in unshared_end(chain, self.is_shared) if key in self]
        self.surplus.drop(end)
        return len(end)

    def parent_of(self, key: Key) -> Key | None:
        """The key before a block in its chain; None for the first."""
        return self._parents.get(key)

    def evict(self) -> bool:
        """Evict one block. False, counted: every block is pinned."""
        for copy in self.surplus.unused():
            if self._can_go(copy) and copy not in self._children:
                self._evict(copy)
                return True
        key = self.policy.victim(self._may_go) if self.kept else None
        if key is None:
            key = self.policy.victim(self._can_go)
        if key is None:
            self.num_refusals += 1
            return False
        leaf: Key = key  # type: ignore[assignment]
        while below := self._children.get(leaf):
            leaf = next(iter(below))
        self._evict(leaf)
        return True

    def _evict(self, key: Key) -> None:
        if self.on_evicted is not None:
            self.on_evicted(key, self._slots[key])
        self.num_evictions += 1
        self._forget(key)

    def _can_go(self, key: Hashable) -> bool:
        # A pin includes the predecessors: an unpinned block has no pinned descendants.
        return self._slots[key] not in self._pins  # type: ignore[index]

    def _may_go(self, key: Hashable) -> bool:
        return self._can_go(key) and key not in self.kept

    def pin(self, slots: Iterable[int]) -> None:
        """Keep the blocks in these slots (the first of a chain, from ``match``) until ``unpin``."""
        pins = self._pins
        for slot in slots:
            pins[slot] = pins.get(slot, 0) + 1

    def unpin(self, slots: Iterable[int]) -> None:
        pins = self._pins
        for slot in slots:
            left = pins[slot] - 1
            if left:
                pins[slot] = left
                continue
            del pins[slot]
            if slot in self._removed_while_pinned:
                self._removed_while_pinned.discard(slot)
                self._give_back(slot)

    def remove(self, key: Key) -> list[Key]:
        """Drop a block and its descendants, without ``on_evicted``. Pinned ones keep their bytes until they
        are unpinned but are not found. Returns the removed keys, the last of a chain first."""
        if key not in self._slots:
            return []
        gone = [*self.after(key), key]
        for each in gone:
            self._forget(each)
        return gone

    def after(self, key: Key) -> list[Key]:
        """The descendants here of a block, itself here or not: the last first."""
        found: list[Key] = []
        stack = list(self._children.get(key, ()))
        while stack:
            child = stack.pop()
            found.append(child)
            stack += self._children.get(child, ())
        return found[::-1]

    def _forget(self, key: Key) -> None:
        slot = self._slots.pop(key)
        if slot in self._pins:
            self._removed_while_pinned.add(slot)
        else:
            self._give_back(slot)
        parent = self._parents.pop(key, None)
        if parent is not None:
            siblings = self._children[parent]
            siblings.discard(key)
            if not siblings:
                del self._children[parent]
        self.policy.removed(key)
        self.surplus.forget(key)

    def check_integrity(self) -> None:
        """Assert every invariant; costs time proportional to the tier."""
        taken = set(self._slots.values())
        free = set(self._free)
        assert len(taken) == len(self._slots), "a slot holds two blocks"
        assert len(free) == len(self._free), "a slot is free twice"
        assert not taken & free, "a used slot is free"
        assert not self._removed_while_pinned & (taken | free), "a removed block's slot is used or free"
        assert not self._reserved & (taken | free | self._removed_while_pinned), (
            "a reserved slot is used or free"
        )
        assert not self._retired & free, "a bad slot is free"
        num_retired = len(self._retired - taken - self._removed_while_pinned - self._reserved)
        num_slots = (
            len(taken) + len(free) + len(self._removed_while_pinned) + len(self._reserved) + num_retired
        )
        assert num_slots == self.capacity, "a slot is lost"
        assert self._removed_while_pinned <= self._pins.keys(), "an unpinned slot is not given back"
        assert self._pins.keys() <= taken | self._removed_while_pinned, "a free slot is pinned"
        assert all(key in self._slots for key in self.surplus.unused()), "a surplus copy that is not here"
        for key, parent in self._parents.items():
            assert key in self._slots, "a link from a block that is not here"
            assert key in self._children[parent], "a block missing from its parent's children"
        assert sum(map(len, self._children.values())) == len(self._parents), "a child without a link back"
