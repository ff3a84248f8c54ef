"""The holders of a block: an int with a few bits for each node, one object for equal sets of nodes."""

from __future__ import annotations

from dataclasses import dataclass, field

from moonpool.kvstore.blocks.tier import Tier

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
    """The ``Holders`` of each mask, and the node of each flag."""

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
        """All bits of the node."""
        return self.flag * ((1 << MASK_WIDTH) - 1)


def tier_in(mask: int, flag: int) -> Tier | None:
    """The tier that a mask names for the node of ``flag``; None: the node does not hold the block."""
    if not mask & flag:
        return None
    its = mask // flag
    return next((tier for tier in Tier if tier and its >> tier & 1), Tier.POOL)
