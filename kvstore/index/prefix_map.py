"""The prefix lengths of one chain on many nodes, without naming every node."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt


class PrefixMap(Mapping[str, int]):
    """Node id to number of leading blocks, as a mapping over (mask, length) groups.

    Looking up one node or spreading lengths over an array is cheap however many nodes hold the chain;
    iterating costs as much as a dict. Valid until a node leaves and its slot is reused.
    """

    def __init__(
        self,
        groups: Sequence[tuple[int, int]],
        width: int,
        slot_of: Callable[[str], int],
        names: Callable[[int], Sequence[str]],
    ) -> None:
        """``groups``: disjoint masks, longest first; ``width``: bits of a node in a mask."""
        self._groups = groups
        self._width = width
        self._slot_of = slot_of
        self._names = names

    def __getitem__(self, node_id: str) -> int:
        slot = self._slot_of(node_id)
        if slot >= 0:
            bit = slot * self._width
            for mask, length in self._groups:
                if mask >> bit & 1:
                    return length
        raise KeyError(node_id)

    def __iter__(self) -> Iterator[str]:
        for mask, _ in self._groups:
            yield from self._names(mask)

    def __len__(self) -> int:
        return sum(mask.bit_count() for mask, _ in self._groups)

    def __bool__(self) -> bool:
        return bool(self._groups)

    def longest(self, count: int) -> dict[str, int]:
        """``count`` of the nodes with the longest prefixes, or all."""
        found: dict[str, int] = {}
        for mask, length in self._groups:
            for node_id in self._names(_lowest(mask, count - len(found))):
                found[node_id] = length
            if len(found) >= count:
                break
        return found

    def spread(self, slots: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """float64 [len(slots)]: the length of the node in each slot; slot -1: none."""
        lengths = np.zeros(len(slots))
        for mask, length in self._groups:
            nbytes = (mask.bit_length() + 7) // 8
            bits = np.frombuffer(mask.to_bytes(nbytes, "little"), np.uint8)
            held = np.unpackbits(bits, bitorder="little")[:: self._width]
            # Slots beyond the mask's end, and -1, find the zero appended here.
            held = np.append(held, np.uint8(0))
            where = np.minimum(slots, len(held) - 1)
            lengths[held[where] != 0] = length
        return lengths


class SlowBlocks(Mapping[str, tuple[int, int]]):
    """Node id to (blocks in host memory, blocks on SSD) of its prefix, computed on access."""

    def __init__(self, slow_of: Callable[[str], tuple[int, int] | None], prefixes: Mapping[str, int]) -> None:
        self._slow_of = slow_of
        self._prefixes = prefixes

    def __getitem__(self, node_id: str) -> tuple[int, int]:
        slow = self._slow_of(node_id) if node_id in self._prefixes else None
        if slow is None:
            raise KeyError(node_id)
        return slow

    def __iter__(self) -> Iterator[str]:
        return (node_id for node_id in self._prefixes if self._slow_of(node_id) is not None)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _lowest(mask: int, count: int) -> int:
    if mask.bit_count() <= count:
        return mask
    lowest = 0
    for _ in range(count):
        bit = mask & -mask
        lowest |= bit
        mask ^= bit
    return lowest
