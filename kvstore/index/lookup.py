"""Queries of the map from blocks to nodes, answered in microseconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from moonpool.kvstore.blocks.tier import Tier
from moonpool.kvstore.index.prefix_map import PrefixMap, SlowBlocks

# Bits of a node in a mask: the lowest for holding the block, the others for a copy in that slower tier.
MASK_WIDTH = len(Tier)

# Equal masks share one Holders up to this many different ones.
_MAX_SHARED_HOLDERS = 1 << 16


class Holders:
    """The nodes that hold a block. Immutable, except for the cached names of living nodes."""

    __slots__ = ("generation", "mask", "names")

    def __init__(self, mask: int) -> None:
        self.mask = mask
        self.names: tuple[str, ...] = ()
        self.generation = -1  # of the map, when ``names`` were found


class HoldersTable:
    def __init__(self) -> None:
        self.alive = 0  # flags of the nodes that are there
        self.generation = 0  # counts joins and leaves
        self.tiered = False  # whether any block was ever in a slower tier
        self._by_mask: dict[int, Holders] = {}
        self._node_ids: dict[int, str] = {}  # by flag

    def join(self, flag: int, node_id: str) -> None:
        self.alive |= flag
        self.generation += 1
        self._node_ids[flag] = node_id

    def leave(self, flag: int) -> None:
        self.alive &= ~flag
        self.generation += 1
        del self._node_ids[flag]

    def of(self, mask: int) -> Holders:
        """Return one and the same object for equal masks, up to a limit."""
        by_mask = self._by_mask
        if len(by_mask) > _MAX_SHARED_HOLDERS:
            by_mask.clear()
        found = by_mask.get(mask)
        if found is None:
            found = by_mask[mask] = Holders(mask)
        return found

    def names(self, holders: Holders) -> tuple[str, ...]:
        """The living nodes among them, cached."""
        if holders.generation != self.generation:
            names = []
            rest = holders.mask & self.alive
            while rest:
                flag = rest & -rest
                names.append(self._node_ids[flag])
                rest ^= flag
            holders.names, holders.generation = tuple(names), self.generation
        return holders.names


@dataclass(slots=True, eq=False)
class NodeSlot:
    node_id: str
    flag: int  # "holds it"
    runs: list[bytes] = field(default_factory=list)  # packed keys as stored; some may be removed
    run_keys: int = 0  # keys in runs
    num_held: int = 0  # keys with this slot's bit
    # While the node publishes all its blocks again: the former runs, and the keys published since.
    previous: list[bytes] = field(default_factory=list)
    renewed: set[bytes] | None = None

    @property
    def bits(self) -> int:
        return self.flag * ((1 << MASK_WIDTH) - 1)


def tier_in(mask: int, flag: int) -> Tier | None:
    """The tier that a mask names for the node of ``flag``; None: the node does not hold the block."""
    if not mask & flag:
        return None
    its = mask // flag
    return next((tier for tier in Tier if tier and its >> tier & 1), Tier.POOL)


_SLOW = sum(1 << tier for tier in Tier if tier)


class Lookup:
    """Reads the data of ``BlockMap``. A node holds a block only with its predecessors, so the longest prefix
    is found by binary search."""

    def __init__(
        self, holders: Mapping[bytes, Holders], table: HoldersTable, by_node: Mapping[str, NodeSlot]
    ) -> None:
        self._holders = holders
        self._table = table
        self._by_node = by_node

    def longest_prefix(self, keys: Sequence[bytes]) -> dict[str, int]:
        """How many of a chain's leading blocks each node holds, in any tier; without nodes that hold none."""
        get = self._holders.get
        first = get(keys[0]) if keys else None
        if first is None:
            return {}
        # Usually the same nodes hold the whole chain: then only identity is compared.
        low, high = 0, len(keys)
        while (middle := (low + high) >> 1) != low:
            here = get(keys[middle])
            if here is None:
                high = middle
            elif here is first:
                low = middle
            else:
                groups = self.prefix_masks(keys)
                return {name: length for mask, length in groups for name in self.node_ids(mask)}
        table = self._table
        names = first.names if first.generation == table.generation else table.names(first)
        return dict.fromkeys(names, high)

    def prefix_map(self, keys: Sequence[bytes], among: int = -1) -> PrefixMap:
        """``longest_prefix`` for many nodes; ``among``: a mask of node flags."""
        return PrefixMap(self.prefix_masks(keys, among), MASK_WIDTH, self.slot_of, self.node_ids)

    def prefix_masks(self, keys: Sequence[bytes], among: int = -1) -> list[tuple[int, int]]:
        """(flags of nodes, how many of a chain's leading blocks they hold), longest first.

        O(log n) look-ups for each different length.
        """
        get = self._holders.get
        first = get(keys[0]) if keys else None
        wanted = first.mask & self._table.alive & among if first is not None else 0
        groups: list[tuple[int, int]] = []
        high = len(keys)
        while wanted:
            # Find the last block that any wanted node holds.
            low, here, seen = 0, wanted, None
            while (middle := (low + high) >> 1) != low:
                holders = get(keys[middle])
                if holders is None:
                    high = middle
                elif holders is seen:
                    low = middle
                elif mask := holders.mask & wanted:
                    low, here, seen = middle, mask, holders
                else:
                    high = middle
            groups.append((here, high))
            if here == wanted:
                break
            wanted ^= here
            high = low
        return groups

    def node_ids(self, flags: int) -> tuple[str, ...]:
        return self._table.names(self._table.of(flags))

    def slow_blocks(
        self, keys: Sequence[bytes], prefixes: Mapping[str, int]
    ) -> Mapping[str, tuple[int, int]]:
        """Of each node's prefix: the number of blocks in host memory and on SSD; without nodes that have
        neither.

        Nodes demote the ends of chains first, so the bounds between tiers are found by binary search.
        """
        if not self._table.tiered:
            return {}
        return SlowBlocks(lambda node_id: self._slow_of(node_id, keys, prefixes), prefixes)

    def _slow_of(
        self, node_id: str, keys: Sequence[bytes], prefixes: Mapping[str, int]
    ) -> tuple[int, int] | None:
        flag, length = self._by_node[node_id].flag, prefixes[node_id]
        if not self._mask(keys[length - 1]) & flag * _SLOW:
            return None
        on_ssd = self._tail(keys, length, flag << Tier.SSD)
        return self._tail(keys, length, flag * _SLOW) - on_ssd, on_ssd

    def _tail(self, keys: Sequence[bytes], length: int, bits: int) -> int:
        """How many of the last of ``length`` blocks have one of ``bits``."""
        low, high = 0, length
        while low < high:
            middle = (low + high) >> 1
            if self._mask(keys[middle]) & bits:
                high = middle
            else:
                low = middle + 1
        return length - low

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
        rest = mask & self._table.alive
        for tier in (tier for tier in Tier if tier):
            those = mask >> tier & rest
            counts[tier] = those.bit_count()
            rest ^= those
        counts[Tier.POOL] = rest.bit_count()
        return {tier: counts[tier] for tier in Tier if counts[tier]}

    def _mask(self, key: bytes) -> int:
        holders = self._holders.get(key)
        return holders.mask if holders is not None else 0
