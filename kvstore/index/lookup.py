"""Questions to the map from blocks to nodes, answered in microseconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from moonpool.kvstore.blocks.tier import Tier
from moonpool.kvstore.index.holders import MASK_WIDTH, Holders, HoldersTable, NodeSlot, tier_in
from moonpool.kvstore.index.prefix_map import PrefixMap, SlowBlocks

_SLOW = sum(1 << tier for tier in Tier if tier)


class Lookup:
    """Reads what ``BlockMap`` keeps. Nodes keep their chains prefix-closed (a block is held only with all
    blocks before it), so the longest prefix is found by binary search."""

    def __init__(
        self, holders: Mapping[bytes, Holders], table: HoldersTable, by_node: Mapping[str, NodeSlot]
    ) -> None:
        self._holders = holders
        self._table = table
        self._by_node = by_node

    def longest_prefix(self, keys: Sequence[bytes]) -> dict[str, int]:
        """How many of a chain's leading blocks each node holds; nodes that hold none are left out."""
        get = self._holders.get
        first = get(keys[0]) if keys else None
        if first is None:
            return {}
        # Mostly the same nodes hold all that is held of a chain: then nothing but identity is compared.
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
        """The same for many nodes, of those in the mask ``among``."""
        return PrefixMap(self.prefix_masks(keys, among), MASK_WIDTH, self.slot_of, self.node_ids)

    def prefix_masks(self, keys: Sequence[bytes], among: int = -1) -> list[tuple[int, int]]:
        """(flags of nodes, how many of a chain's leading blocks they hold), longest first.

        O(log n) look-ups for each different length found.
        """
        get = self._holders.get
        first = get(keys[0]) if keys else None
        wanted = first.mask & self._table.alive & among if first is not None else 0
        groups: list[tuple[int, int]] = []
        high = len(keys)
        while wanted:
            # Some wanted node holds the first block: find the last block that any of them holds.
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
        """The living nodes of these flags."""
        return self._table.names(self._table.of(flags))

    def slow_blocks(
        self, keys: Sequence[bytes], prefixes: Mapping[str, int]
    ) -> Mapping[str, tuple[int, int]]:
        """Of the leading blocks ``prefixes`` says each node holds, those in host memory and those on SSD.

        Nodes move the ends of their chains to slower tiers first, so the bounds between the tiers are found
        by binary search. Nodes with all of it in the pool are left out.
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
        """The node's place in masks, for as long as it lives; -1: unknown."""
        return self.flag_of(node_id).bit_length() // MASK_WIDTH if node_id in self._by_node else -1

    def flag_of(self, node_id: str) -> int:
        """The bit that stands for the node in masks; 0: unknown."""
        slot = self._by_node.get(node_id)
        return 0 if slot is None else slot.flag

    def tier_of(self, node_id: str, key: bytes) -> Tier | None:
        """The fastest tier in which the node holds the block; None: it does not."""
        slot = self._by_node.get(node_id)
        return None if slot is None else tier_in(self._mask(key), slot.flag)

    def _mask(self, key: bytes) -> int:
        holders = self._holders.get(key)
        return holders.mask if holders is not None else 0
