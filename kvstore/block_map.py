"""Which nodes hold which block, for finding the longest prefix on every node in a few microseconds.

A dict maps each key to an int with a few bits for each node: that it holds the block, and in which slower
tier. Nodes keep their chains prefix-closed (a block is held only with all blocks before it), so the longest
prefix is found by binary search. A node's own keys are kept as the packed runs they came in (16 bytes a
block): that is the reverse index which makes dropping a node cost what it owned.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kvstore.changes import split
from kvstore.keys import KEY_NBYTES
from kvstore.prefix_map import PrefixMap, SlowBlocks
from kvstore.tier import Tier

# Bits of a node in a mask: the lowest says that it holds the block, the others that its copy is in that tier.
_WIDTH = len(Tier)
_SLOW = sum(1 << tier for tier in Tier if tier)

# Equal masks share one int while fewer than this many different ones have been seen.
_MAX_SHARED_MASKS = 1 << 16

_RUN_KEYS = 1024


@dataclass(slots=True, eq=False)
class _Slot:
    node_id: str
    flag: int  # "holds it"
    runs: list[bytes] = field(default_factory=list)  # packed keys, as stored; some may be gone again
    run_keys: int = 0  # keys in runs
    num_held: int = 0  # keys with this slot's bit
    # While everything the node holds is published anew: what was known before, and what has been said since.
    previous: list[bytes] = field(default_factory=list)
    renewed: set[bytes] | None = None

    @property
    def bits(self) -> int:
        """All of the node's bits."""
        return self.flag * ((1 << _WIDTH) - 1)


class BlockMap:
    """All methods run on one thread. A dropped node is invisible at once; ``sweep`` then clears its bits,
    and its slot is used again only after that."""

    def __init__(self) -> None:
        self._masks: dict[bytes, int] = {}
        self._shared: dict[int, int] = {}
        self._slots: dict[int, _Slot] = {}  # by flag
        self._by_node: dict[str, _Slot] = {}
        self._free_flags: list[int] = []
        self._alive = 0
        self._dead: list[_Slot] = []  # to be swept altogether
        self._settling: list[_Slot] = []  # their ``previous`` is to be swept of what was not renewed
        self._members: dict[int, tuple[str, ...]] = {}
        self._tiered = False  # whether any block was ever in a slower tier

    # ------------------------------------------------------------------ nodes come and go

    def join(self, node_id: str) -> None:
        """A node, or a new life of one: it holds nothing."""
        self.leave(node_id)
        flag = self._free_flags.pop() if self._free_flags else 1 << _WIDTH * len(self._slots)
        slot = self._slots[flag] = self._by_node[node_id] = _Slot(node_id, flag)
        self._alive |= slot.flag
        self._members.clear()

    def leave(self, node_id: str) -> None:
        """Its entries are gone in one step, seen from ``longest_prefix``."""
        slot = self._by_node.pop(node_id, None)
        if slot is not None:
            self._alive &= ~slot.flag
            slot.runs += slot.previous
            slot.previous, slot.renewed = [], None
            if slot in self._settling:
                self._settling.remove(slot)
            self._dead.append(slot)
            self._members.clear()

    def begin(self, node_id: str) -> None:
        """The node is about to say everything it holds. What was known stays until ``complete``."""
        slot = self._by_node[node_id]
        slot.previous += slot.runs
        slot.runs, slot.run_keys = [], 0
        slot.renewed = set()
        if slot in self._settling:
            self._settling.remove(slot)

    def complete(self, node_id: str) -> None:
        """It has said everything since ``begin``: ``sweep`` removes what it did not name."""
        slot = self._by_node[node_id]
        if slot.renewed is not None and slot not in self._settling:
            self._settling.append(slot)

    # ------------------------------------------------------------------ blocks

    def store(self, node_id: str, packed: bytes, tier: Tier) -> None:
        """The node holds these keys, its fastest copy in ``tier``."""
        slot = self._by_node[node_id]
        masks, flag, bits = self._masks, slot.flag, slot.bits
        want = flag | (flag << tier if tier else 0)
        self._tiered = self._tiered or tier > 0
        keys = split(packed)
        fresh = 0
        for key in keys:
            mask = masks.get(key)
            if mask is None:
                masks[key] = want
                fresh += 1
            elif mask & bits != want:
                fresh += not mask & flag
                masks[key] = self._share(mask & ~bits | want)
        slot.num_held += fresh
        if slot.renewed is not None:
            slot.renewed.update(keys)
        if fresh or slot.renewed is not None:
            slot.runs.append(packed)
            slot.run_keys += len(keys)
        if slot.run_keys > 2 * slot.num_held + 4096 and slot.renewed is None:
            self._repack(slot)

    def remove(self, node_id: str, packed: bytes) -> None:
        slot = self._by_node[node_id]
        keys = split(packed)
        self._forget(slot, keys)
        if slot.renewed is not None:
            slot.renewed.difference_update(keys)

    def _forget(self, slot: _Slot, keys: list[bytes]) -> None:
        masks, flag, bits = self._masks, slot.flag, slot.bits
        for key in keys:
            mask = masks.get(key, 0)
            if mask & flag:
                slot.num_held -= 1
                rest = mask & ~bits
                if rest:
                    masks[key] = self._share(rest)
                else:
                    del masks[key]

    def _share(self, mask: int) -> int:
        shared = self._shared
        if len(shared) > _MAX_SHARED_MASKS:
            shared.clear()
        return shared.setdefault(mask, mask)

    def _repack(self, slot: _Slot) -> None:
        """Drop from the runs what is held no more, or named twice."""
        masks, flag = self._masks, slot.flag
        live = list({key for run in slot.runs for key in split(run) if masks.get(key, 0) & flag})
        slot.runs = [b"".join(live[at : at + _RUN_KEYS]) for at in range(0, len(live), _RUN_KEYS)]
        slot.run_keys = len(live)

    def sweep(self, max_keys: int = 4096) -> bool:
        """Do about ``max_keys`` keys of the cleaning that is due. True: there is more."""
        budget = max_keys
        while self._dead and budget > 0:
            slot = self._dead[-1]
            while slot.runs and budget > 0:
                budget -= self._sweep_run(slot, slot.runs, budget, None)
            if not slot.runs:
                assert slot.num_held == 0
                self._dead.pop()
                del self._slots[slot.flag]
                self._free_flags.append(slot.flag)
        while self._settling and budget > 0:
            slot = self._settling[-1]
            while slot.previous and budget > 0:
                budget -= self._sweep_run(slot, slot.previous, budget, slot.renewed)
            if not slot.previous:
                slot.renewed = None
                self._settling.pop()
        return bool(self._dead or self._settling)

    def _sweep_run(self, slot: _Slot, runs: list[bytes], budget: int, keep: set[bytes] | None) -> int:
        run = runs.pop()
        cut = budget * KEY_NBYTES
        if len(run) > cut:
            runs.append(run[cut:])
            run = run[:cut]
        keys = split(run)
        self._forget(slot, [key for key in keys if key not in keep] if keep else keys)
        return max(len(keys), 1)

    # ------------------------------------------------------------------ questions

    @property
    def num_blocks(self) -> int:
        """Different keys, those of dropped nodes included until they are swept."""
        return len(self._masks)

    def num_held(self, node_id: str) -> int:
        return self._by_node[node_id].num_held

    def longest_prefix(self, keys: Sequence[bytes]) -> dict[str, int]:
        """How many of a chain's leading blocks each node holds; nodes that hold none are left out."""
        found: dict[str, int] = {}
        for mask, length in self.prefix_masks(keys):
            for node_id in self._members.get(mask) or self._name(mask):
                found[node_id] = length
        return found

    def prefix_map(self, keys: Sequence[bytes], among: int = -1) -> PrefixMap:
        """The same for many nodes, of those in the mask ``among``."""
        return PrefixMap(self.prefix_masks(keys, among), _WIDTH, self.slot_of, self._name)

    def prefix_masks(self, keys: Sequence[bytes], among: int = -1) -> list[tuple[int, int]]:
        """(mask of nodes, how many of a chain's leading blocks they hold), longest first.

        O(log n) look-ups for each different length found.
        """
        groups: list[tuple[int, int]] = []
        if not keys:
            return groups
        get = self._masks.get
        wanted = get(keys[0], 0) & self._alive & among
        high = len(keys) - 1
        while wanted:
            # Some wanted node holds the first block: find the last block that any of them holds.
            low, here = 0, wanted
            while low < high:
                middle = (low + high + 1) >> 1
                if mask := get(keys[middle], 0) & wanted:
                    low, here = middle, mask
                else:
                    high = middle - 1
            groups.append((here, low + 1))
            if here == wanted:
                break
            wanted ^= here
            high = low - 1
        return groups

    def _name(self, mask: int) -> tuple[str, ...]:
        """The node ids of a mask, remembered."""
        names = []
        rest = mask
        while rest:
            flag = rest & -rest
            names.append(self._slots[flag].node_id)
            rest ^= flag
        if len(self._members) > 4096:
            self._members.clear()
        members = self._members[mask] = tuple(names)
        return members

    def slow_blocks(
        self, keys: Sequence[bytes], prefixes: Mapping[str, int]
    ) -> Mapping[str, tuple[int, int]]:
        """Of the leading blocks ``prefixes`` says each node holds, those in host memory and those on SSD.

        Nodes move the ends of their chains to slower tiers first, so the bounds between the tiers are found
        by binary search. Nodes with all of it in the pool are left out.
        """
        return (
            SlowBlocks(lambda node_id: self._slow_of(node_id, keys, prefixes), prefixes)
            if self._tiered
            else {}
        )

    def _slow_of(
        self, node_id: str, keys: Sequence[bytes], prefixes: Mapping[str, int]
    ) -> tuple[int, int] | None:
        flag, length = self._by_node[node_id].flag, prefixes[node_id]
        if not self._masks.get(keys[length - 1], 0) & flag * _SLOW:
            return None
        on_ssd = self._tail(keys, length, flag << Tier.SSD)
        return self._tail(keys, length, flag * _SLOW) - on_ssd, on_ssd

    def _tail(self, keys: Sequence[bytes], length: int, bits: int) -> int:
        """How many of the last of ``length`` blocks have one of ``bits``."""
        get, low, high = self._masks.get, 0, length
        while low < high:
            middle = (low + high) >> 1
            if get(keys[middle], 0) & bits:
                high = middle
            else:
                low = middle + 1
        return length - low

    def slot_of(self, node_id: str) -> int:
        """The node's place in masks, for as long as it lives; -1: unknown."""
        slot = self._by_node.get(node_id)
        return -1 if slot is None else slot.flag.bit_length() // _WIDTH

    def flag_of(self, node_id: str) -> int:
        """The bit that stands for the node in masks; 0: unknown."""
        slot = self._by_node.get(node_id)
        return 0 if slot is None else slot.flag

    def tier_of(self, node_id: str, key: bytes) -> Tier | None:
        """The fastest tier in which the node holds the block; None: it does not."""
        slot = self._by_node.get(node_id)
        if slot is None or not self._masks.get(key, 0) & slot.flag:
            return None
        its = self._masks[key] // slot.flag
        return next((tier for tier in Tier if tier and its >> tier & 1), Tier.POOL)

    def held_by(self, node_id: str) -> set[bytes]:
        """Every key of a node: the long way, for checks."""
        flag = self._by_node[node_id].flag
        return {key for key, mask in self._masks.items() if mask & flag}

    def check_integrity(self) -> None:
        """Every bit belongs to a slot, is in its reverse index, and is counted."""
        known = 0
        for flag, slot in self._slots.items():
            assert flag == slot.flag
            assert not known & slot.bits
            known |= slot.bits
            reverse = {key for run in slot.runs + slot.previous for key in split(run)}
            held = {key for key, mask in self._masks.items() if mask & flag}
            assert held <= reverse
            assert len(held) == slot.num_held
        assert all(mask and not mask & ~known for mask in self._masks.values())
        assert not known & sum(self._free_flags)
        assert self._alive == sum(slot.flag for slot in self._by_node.values())
