"""The different sets of nodes that hold blocks, numbered. A block of the index has the number of its set."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from moonpool.kvstore.blocks.tier import Tier

# Bits of a node in a mask: the lowest for holding the block, those of the slower tiers for a copy there, and
# the highest for a block that the node has not named since it began to publish all its blocks again.
MASK_WIDTH = len(Tier) + 1


def flag_bits(flag: int) -> int:
    """All bits of a node, of which ``flag`` is the lowest."""
    return flag * ((1 << MASK_WIDTH) - 1)


def former(flag: int) -> int:
    return flag << MASK_WIDTH - 1


class NodeSet:
    """A mask with the bits of each node, and the names of its nodes once they were asked for."""

    __slots__ = ("mask", "names")

    def __init__(self, mask: int) -> None:
        self.mask = mask
        self.names: tuple[str, ...] | None = None


class NodeSets:
    """Number 0 stands for no node. When a node leaves, sets change in place, and so do all blocks at once.
    Then several numbers may have equal masks, until the blocks are moved to one of them (``same``)."""

    def __init__(self) -> None:
        self.numbered = [NodeSet(0)]
        self.alive = 0  # flags of the nodes that are there
        self.tiered = False  # whether any block was ever in a slower tier
        self.node_ids: dict[int, str] = {}  # by flag
        self._by_mask = {0: 0}
        self._free: list[int] = []
        self._free_beyond = 1024  # look for unused sets when there are so many

    def __len__(self) -> int:
        return len(self.numbered)

    def join(self, flag: int, node_id: str) -> None:
        self.alive |= flag
        self.node_ids[flag] = node_id

    def leave(self, flag: int) -> None:
        self.rewrite(flag, clear=flag_bits(flag))
        self.alive &= ~flag
        del self.node_ids[flag]

    def of(self, mask: int) -> int:
        """The number of the set with this mask."""
        number = self._by_mask.get(mask)
        if number is None:
            made = NodeSet(mask)
            if self._free:
                number = self._free.pop()
                self.numbered[number] = made
            else:
                number = len(self.numbered)
                self.numbered.append(made)
            self._by_mask[mask] = number
        return number

    def names(self, one: NodeSet) -> tuple[str, ...]:
        if one.names is None:
            one.names = tuple(self.names_in(one.mask))
        return one.names

    def names_in(self, mask: int) -> Iterator[str]:
        """The nodes that a mask says hold the block."""
        rest = mask & self.alive
        while rest:
            flag = rest & -rest
            yield self.node_ids[flag]
            rest ^= flag

    def rewrite(self, having: int, *, clear: int = 0, add: int = 0) -> list[int]:
        """Change all sets with a bit of ``having``. Returns their numbers. Takes 0.1 µs for each set."""
        changed = [number for number, one in enumerate(self.numbered) if one.mask & having]
        for number in changed:
            one = self.numbered[number]
            if self._by_mask.get(one.mask) == number:
                del self._by_mask[one.mask]
            one.mask, one.names = one.mask & ~clear | add, None
        for number in changed:
            self._by_mask.setdefault(self.numbered[number].mask, number)
        return changed

    def same(self) -> npt.NDArray[np.uint32]:
        """uint32 [len(self)]: for each number the one that new blocks of its mask get; 0: it has no node.
        Numbers that are free now stand for themselves: they may get blocks before the result is used."""
        by_mask = self._by_mask
        same = np.array([by_mask[one.mask] for one in self.numbered], np.uint32)
        same[self._free] = self._free
        return same

    @property
    def many(self) -> bool:
        """Whether ``free_unused`` may be worth its time."""
        return len(self.numbered) - len(self._free) > self._free_beyond

    def free_unused(self, counts: npt.NDArray[np.uint32]) -> None:
        """Numbers without blocks may be used for other sets. ``counts``: the blocks of each number."""
        free = set(self._free)
        for number in np.flatnonzero(counts == 0).tolist():
            if number and number not in free:
                mask = self.numbered[number].mask
                if self._by_mask.get(mask) == number:
                    del self._by_mask[mask]
                self.numbered[number] = NodeSet(0)
                self._free.append(number)
        for number, one in enumerate(self.numbered):  # another one with the same mask may have blocks
            if one.mask:
                self._by_mask.setdefault(one.mask, number)
        self._free_beyond = 1024 + 2 * (len(self.numbered) - len(self._free))

    def check_integrity(self, counts: npt.NDArray[np.uint32], known: int) -> None:
        """Assert that masks have only bits of ``known``, and every set with blocks can be found."""
        free = set(self._free)
        assert len(free) == len(self._free)
        assert 0 not in free
        assert self._by_mask[0] == 0
        for number, one in enumerate(self.numbered):
            assert not one.mask & ~known
            assert one.mask in self._by_mask or number in free
            assert not (number in free and counts[number])
            assert one.names is None or one.names == tuple(self.names_in(one.mask))
        assert all(self.numbered[number].mask == mask for mask, number in self._by_mask.items())
