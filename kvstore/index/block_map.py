"""The nodes that hold each block, for finding the longest prefix on every node in a microsecond.

A table has for each key the number of its set of nodes (``index.key_table``), and the sets have a few bits
for each node (``index.node_sets``). There is no list of a node's own blocks: dropping a node changes the
sets, and ``sweep`` visits the table in slices.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from moonpool.kvstore.blocks.tier import Tier
from moonpool.kvstore.index.key_table import NUM_PARTS, KeyTable, key_table
from moonpool.kvstore.index.node_sets import MASK_WIDTH, NodeSets, flag_bits, former
from moonpool.kvstore.index.prefix_map import PrefixMap, SlowBlocks


@dataclass(slots=True, eq=False)
class NodeSlot:
    flag: int  # "holds it"
    num_held: int = 0  # keys with this flag
    renewing: bool = False  # it publishes all its blocks again


def tier_in(mask: int, flag: int) -> Tier | None:
    """The tier that a mask names for the node of ``flag``; None: the node does not hold the block."""
    if not mask & flag:
        return None
    its = mask >> flag.bit_length() - 1
    return next((tier for tier in Tier if tier and its >> tier & 1), Tier.POOL)


class BlockMap:
    """A node holds a block only with its predecessors, so the longest prefix is found by binary search.

    All methods run on one thread. A dropped node is invisible at once; ``sweep`` removes its blocks later,
    and only then is its slot reused.
    """

    def __init__(self, new_table: Callable[[], KeyTable] = key_table) -> None:
        self._keys, self._sets = new_table(), NodeSets()
        self._by_node: dict[str, NodeSlot] = {}
        self._num_slots = 0
        self._free_flags: list[int] = []
        self._left: list[int] = []  # flags of nodes that left since the sweep in progress began
        self._unswept = False  # sets have changed since then
        # The sweep in progress: the next part, what sets are replaced by, and flags that are free after it.
        self._part = NUM_PARTS
        self._to: npt.NDArray[np.uint32] = np.zeros(0, np.uint32)
        self._sweeping: list[int] = []

    # ------------------------------------------------------------------ changes

    def join(self, node_id: str) -> None:
        """Add a node, or a new epoch of one, without blocks."""
        self.leave(node_id)
        if self._free_flags:
            flag = self._free_flags.pop()
        else:
            flag = 1 << MASK_WIDTH * self._num_slots
            self._num_slots += 1
        self._by_node[node_id] = NodeSlot(flag)
        self._sets.join(flag, node_id)

    def leave(self, node_id: str) -> None:
        """Remove a node's entries in one step, as seen from ``longest_prefix``."""
        slot = self._by_node.pop(node_id, None)
        if slot is not None:
            self._sets.leave(slot.flag)
            self._left.append(slot.flag)
            self._unswept = True

    def begin(self, node_id: str) -> None:
        """The node is about to publish all its blocks again. Its former ones stay until ``complete``."""
        slot = self._by_node[node_id]
        slot.renewing = True
        self._sets.rewrite(slot.flag, add=former(slot.flag))

    def complete(self, node_id: str) -> None:
        """It has published all its blocks since ``begin``: remove the others."""
        slot = self._by_node[node_id]
        if slot.renewing:
            slot.renewing = False
            gone = self._sets.rewrite(former(slot.flag), clear=flag_bits(slot.flag))
            slot.num_held -= int(self._keys.counts(len(self._sets))[gone].sum())
            self._unswept = self._unswept or bool(gone)

    def is_settled(self, node_id: str) -> bool:
        """Whether the node is not publishing all its blocks again."""
        return not self._by_node[node_id].renewing

    def store(self, node_id: str, packed: bytes, tier: Tier) -> None:
        """The node holds these keys, the fastest copy in ``tier``."""
        slot = self._by_node[node_id]
        self._sets.tiered = self._sets.tiered or tier > 0
        self._move(slot, packed, slot.flag | (slot.flag << tier if tier else 0))

    def remove(self, node_id: str, packed: bytes) -> None:
        self._move(self._by_node[node_id], packed, 0)

    def _move(self, slot: NodeSlot, packed: bytes, want: int) -> None:
        """Make ``want`` the node's bits in the sets of these keys."""
        # A sweep remembers numbers: none may get another meaning before it has ended.
        if self._sets.many and self._part == NUM_PARTS:
            self._sets.free_unused(self._keys.counts(len(self._sets)))
        change = partial(_changed, self._sets, slot.flag, flag_bits(slot.flag), want)
        slot.num_held += self._keys.move(packed, change, 0)

    def sweep(self, max_keys: int = 4096) -> bool:
        """Clean up about ``max_keys`` keys. True: more is due."""
        budget = max_keys
        while budget > 0 and (self._part < NUM_PARTS or self._unswept):
            if self._part == NUM_PARTS:
                self._part, self._unswept, self._to = 0, False, self._sets.same()
                self._sweeping, self._left = self._left, []
            budget -= max(self._keys.replace(self._part, self._to), 1)
            self._part += 1
            if self._part == NUM_PARTS:
                self._free_flags += self._sweeping
                self._sweeping = []
        return self._part < NUM_PARTS or self._unswept

    # ------------------------------------------------------------------ queries

    @property
    def num_blocks(self) -> int:
        """Different keys, including those of dropped nodes that are not swept yet."""
        return len(self._keys)

    def num_held(self, node_id: str) -> int:
        return self._by_node[node_id].num_held

    def part_of(self, node_id: str, part: int, num_parts: int) -> dict[bytes, Tier]:
        """The node's blocks with a last key byte of ``part`` modulo ``num_parts``."""
        flag, sets = self._by_node[node_id].flag, self._sets.numbered
        wanted = np.array([one.mask & flag != 0 for one in sets], np.uint8)
        keys, numbers = self._keys.select(part, num_parts, wanted)
        tiers = {number: tier_in(sets[number].mask, flag) or Tier.POOL for number in set(numbers)}
        return {key: tiers[number] for key, number in zip(keys, numbers, strict=True)}

    def held_by(self, node_id: str) -> set[bytes]:
        """Every key of a node; slow, for checks."""
        return set(self.part_of(node_id, 0, 1))

    def longest_prefix(self, keys: Sequence[bytes]) -> dict[str, int]:
        """How many of a chain's leading blocks each node holds, in any tier; without nodes that hold none."""
        runs, sets = self._keys.runs(keys), self._sets
        if len(runs) == 1:  # usually the same nodes hold the whole chain
            ((end, number),) = runs
            one = sets.numbered[number]
            names = one.names
            return dict.fromkeys(sets.names(one) if names is None else names, end)
        return {name: length for mask, length in self._groups(runs, -1) for name in sets.names_in(mask)}

    def prefix_map(self, keys: Sequence[bytes], among: int = -1) -> PrefixMap:
        """``longest_prefix`` for many nodes; ``among``: a mask of node flags."""
        return PrefixMap(self._groups(self._keys.runs(keys), among), MASK_WIDTH, self.slot_of, self.node_ids)

    def _groups(self, runs: list[tuple[int, int]], among: int) -> list[tuple[int, int]]:
        """(flags of nodes, how many of a chain's leading blocks they hold), longest first."""
        numbered, groups = self._sets.numbered, list[tuple[int, int]]()
        wanted = numbered[runs[0][1]].mask & self._sets.alive & among if runs else 0
        for end, number in reversed(runs):
            if here := numbered[number].mask & wanted:
                groups.append((here, end))
                wanted ^= here
        return groups

    def node_ids(self, flags: int) -> tuple[str, ...]:
        return tuple(self._sets.names_in(flags))

    def slow_blocks(
        self, keys: Sequence[bytes], prefixes: Mapping[str, int]
    ) -> Mapping[str, tuple[int, int]]:
        """Of each node's prefix: the number of blocks in host memory and on SSD; without nodes that have
        neither.

        Nodes demote the ends of chains first, so each run of blocks is in one tier.
        """
        sets = self._sets
        if not sets.tiered:
            return {}
        runs = [(end, sets.numbered[number].mask) for end, number in self._keys.runs(keys)]
        return SlowBlocks(lambda node_id: self._slow_of(node_id, runs, prefixes[node_id]), prefixes)

    def _slow_of(self, node_id: str, runs: list[tuple[int, int]], length: int) -> tuple[int, int] | None:
        flag, start = self._by_node[node_id].flag, 0
        slow = {Tier.HOST: 0, Tier.SSD: 0}
        for end, mask in runs:
            if (tier := tier_in(mask, flag)) in slow and start < length:
                slow[tier] += min(end, length) - start
            start = end
        return (slow[Tier.HOST], slow[Tier.SSD]) if any(slow.values()) else None

    def slot_of(self, node_id: str) -> int:
        """The node's index in masks while it lives; -1: unknown."""
        return self.flag_of(node_id).bit_length() // MASK_WIDTH if node_id in self._by_node else -1

    def flag_of(self, node_id: str) -> int:
        """The node's bit in masks; 0: unknown."""
        slot = self._by_node.get(node_id)
        return 0 if slot is None else slot.flag

    def tier_of(self, node_id: str, key: bytes) -> Tier | None:
        """The fastest tier in which the node holds the block; None: it does not."""
        slot = self._by_node.get(node_id)
        return None if slot is None else tier_in(self._mask(key), slot.flag)

    def tiers_of(self, key: bytes) -> dict[Tier, int]:
        """The nodes that hold the block, by the fastest tier of their copy; it looks at none alone."""
        mask, counts = self._mask(key), {}
        rest = mask & self._sets.alive
        for tier in (tier for tier in Tier if tier):
            those = mask >> tier & rest
            counts[tier] = those.bit_count()
            rest ^= those
        counts[Tier.POOL] = rest.bit_count()
        return {tier: counts[tier] for tier in Tier if counts[tier]}

    def _mask(self, key: bytes) -> int:
        return self._sets.numbered[self._keys.get(key)].mask

    def check_integrity(self) -> None:
        """Assert that every bit belongs to a node, and that blocks are counted by set and by node."""
        sets, living = self._sets, [slot.flag for slot in self._by_node.values()]
        flags = [*living, *self._left, *self._sweeping, *self._free_flags]
        assert sorted(flags) == [1 << MASK_WIDTH * slot for slot in range(self._num_slots)]
        assert sets.alive == sum(living)
        counts = self._keys.counts(len(sets))
        sets.check_integrity(counts, sum(map(flag_bits, living)))
        keys, numbers = self._keys.select(0, 1, np.ones(len(sets), np.uint8))
        assert len(keys) == len(set(keys)) == len(self._keys)
        assert np.array_equal(np.bincount(numbers, minlength=len(sets)), counts)
        assert all(self._keys.get(key) == number for key, number in zip(keys, numbers, strict=True))
        for slot in self._by_node.values():
            held = [number for number in numbers if sets.numbered[number].mask & slot.flag]
            assert len(held) == slot.num_held


def _changed(sets: NodeSets, flag: int, bits: int, want: int, before: int) -> tuple[int, int]:
    """The set that replaces ``before``, and how many blocks more the node has then."""
    mask = sets.numbered[before].mask
    added = bool(want) - bool(mask & flag)
    return (before if mask & bits == want and mask else sets.of(mask & ~bits | want)), added
