"""Queries of the map from blocks to nodes, answered in microseconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from moonpool.kvstore.blocks.tier import Tier
from moonpool.kvstore.index.key_table import KeyTable
from moonpool.kvstore.index.node_sets import MASK_WIDTH, NodeSets
from moonpool.kvstore.index.prefix_map import PrefixMap, SlowBlocks


@dataclass(slots=True, eq=False)
class NodeSlot:
    node_id: str
    flag: int  # "holds it"
    num_held: int = 0  # keys with this flag
    renewing: bool = False  # it publishes all its blocks again


def tier_in(mask: int, flag: int) -> Tier | None:
    """The tier that a mask names for the node of ``flag``; None: the node does not hold the block."""
    if not mask & flag:
        return None
    its = mask >> flag.bit_length() - 1
    return next((tier for tier in Tier if tier and its >> tier & 1), Tier.POOL)


class Lookup:
    """Reads the data of ``BlockMap``. A node holds a block only with its predecessors, so the longest prefix
    is found by binary search."""

    def __init__(self, keys: KeyTable, sets: NodeSets, by_node: dict[str, NodeSlot]) -> None:
        self._keys = keys
        self._sets = sets
        self._by_node = by_node

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
        return PrefixMap(self.prefix_masks(keys, among), MASK_WIDTH, self.slot_of, self.node_ids)

    def prefix_masks(self, keys: Sequence[bytes], among: int = -1) -> list[tuple[int, int]]:
        """(flags of nodes, how many of a chain's leading blocks they hold), longest first."""
        return self._groups(self._keys.runs(keys), among)

    def _groups(self, runs: list[tuple[int, int]], among: int) -> list[tuple[int, int]]:
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
