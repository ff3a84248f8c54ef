"""The nodes that hold each block, for finding the longest prefix on every node in microseconds.

A dict maps each key to its ``Holders``: an int with a few bits for each node, for holding the block and for
the slower tiers. A node's own keys are kept as the packed runs they arrived in (16 bytes a block): this
reverse index makes dropping a node cost what it owned. Queries are in ``index.lookup``.
"""

from __future__ import annotations

from moonpool.kvstore.blocks.keys import KEY_NBYTES
from moonpool.kvstore.blocks.tier import Tier
from moonpool.kvstore.index.lookup import MASK_WIDTH, Holders, HoldersTable, Lookup, NodeSlot, tier_in
from moonpool.kvstore.index.redis.changes import pick, split

_RUN_KEYS = 1024


class BlockMap(Lookup):
    """All methods run on one thread. A dropped node is invisible at once; ``sweep`` clears its bits later,
    and only then is its slot reused."""

    def __init__(self) -> None:
        self._holders: dict[bytes, Holders] = {}
        self._table = HoldersTable()
        self._by_node: dict[str, NodeSlot] = {}
        super().__init__(self._holders, self._table, self._by_node)
        self._slots: dict[int, NodeSlot] = {}  # by flag
        self._free_flags: list[int] = []
        self._dead: list[NodeSlot] = []  # to be swept entirely
        self._settling: list[NodeSlot] = []  # ``previous`` is to be swept of what was not renewed

    def join(self, node_id: str) -> None:
        """Add a node, or a new epoch of one, without blocks."""
        self.leave(node_id)
        flag = self._free_flags.pop() if self._free_flags else 1 << MASK_WIDTH * len(self._slots)
        self._slots[flag] = self._by_node[node_id] = NodeSlot(node_id, flag)
        self._table.join(flag, node_id)

    def leave(self, node_id: str) -> None:
        """Remove a node's entries in one step, as seen from ``longest_prefix``."""
        slot = self._by_node.pop(node_id, None)
        if slot is not None:
            slot.runs += slot.previous
            slot.previous, slot.renewed = [], None
            if slot in self._settling:
                self._settling.remove(slot)
            self._dead.append(slot)
            self._table.leave(slot.flag)

    def begin(self, node_id: str) -> None:
        """The node is about to publish all its blocks again. Its former ones stay until ``complete``."""
        slot = self._by_node[node_id]
        slot.previous += slot.runs
        slot.runs, slot.run_keys = [], 0
        slot.renewed = set()
        if slot in self._settling:
            self._settling.remove(slot)

    def complete(self, node_id: str) -> None:
        """It has published all its blocks since ``begin``: ``sweep`` removes the others."""
        slot = self._by_node[node_id]
        if slot.renewed is not None and slot not in self._settling:
            self._settling.append(slot)

    def is_settled(self, node_id: str) -> bool:
        """Whether the node is not publishing all its blocks again."""
        return self._by_node[node_id].renewed is None

    def store(self, node_id: str, packed: bytes, tier: Tier) -> None:
        """The node holds these keys, the fastest copy in ``tier``."""
        slot = self._by_node[node_id]
        holders, flag, bits = self._holders, slot.flag, slot.bits
        want = flag | (flag << tier if tier else 0)
        self._table.tiered = self._table.tiered or tier > 0
        alone = self._table.of(want)
        joined: dict[Holders, Holders] = {}  # before and after this node joined
        keys = split(packed)
        fresh = 0
        for key in keys:
            before = holders.get(key)
            if before is None:
                holders[key] = alone
                fresh += 1
            elif before.mask & bits != want:
                fresh += not before.mask & flag
                after = joined.get(before)
                if after is None:
                    after = joined[before] = self._table.of(before.mask & ~bits | want)
                holders[key] = after
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

    def _forget(self, slot: NodeSlot, keys: list[bytes]) -> None:
        holders, flag, bits = self._holders, slot.flag, slot.bits
        left: dict[Holders, Holders] = {}
        for key in keys:
            before = holders.get(key)
            if before is None or not before.mask & flag:
                continue
            slot.num_held -= 1
            rest = before.mask & ~bits
            if not rest:
                del holders[key]
                continue
            after = left.get(before)
            if after is None:
                after = left[before] = self._table.of(rest)
            holders[key] = after

    def _repack(self, slot: NodeSlot) -> None:
        """Drop removed and repeated keys from the runs."""
        live = list({key for run in slot.runs for key in split(run) if self._mask(key) & slot.flag})
        slot.runs = [b"".join(live[at : at + _RUN_KEYS]) for at in range(0, len(live), _RUN_KEYS)]
        slot.run_keys = len(live)

    def sweep(self, max_keys: int = 4096) -> bool:
        """Clean up about ``max_keys`` keys. True: more is due."""
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

    def _sweep_run(self, slot: NodeSlot, runs: list[bytes], budget: int, keep: set[bytes] | None) -> int:
        run = runs.pop()
        cut = budget * KEY_NBYTES
        if len(run) > cut:
            runs.append(run[cut:])
            run = run[:cut]
        keys = split(run)
        self._forget(slot, [key for key in keys if key not in keep] if keep else keys)
        return max(len(keys), 1)

    @property
    def num_blocks(self) -> int:
        """Different keys, including those of dropped nodes that are not swept yet."""
        return len(self._holders)

    def num_held(self, node_id: str) -> int:
        return self._by_node[node_id].num_held

    def part_of(self, node_id: str, part: int, num_parts: int) -> dict[bytes, Tier]:
        """The node's blocks with a last key byte of ``part`` modulo ``num_parts``."""
        slot = self._by_node[node_id]
        found = {}
        for run in slot.runs + slot.previous:
            for key in pick(run, part, num_parts):
                if (tier := tier_in(self._mask(key), slot.flag)) is not None:
                    found[key] = tier
        return found

    def held_by(self, node_id: str) -> set[bytes]:
        """Every key of a node; slow, for checks."""
        flag = self._by_node[node_id].flag
        return {key for key, holders in self._holders.items() if holders.mask & flag}

    def check_integrity(self) -> None:
        """Assert that every bit belongs to a slot, is in its reverse index, and is counted."""
        known = 0
        for flag, slot in self._slots.items():
            assert flag == slot.flag
            assert not known & slot.bits
            known |= slot.bits
            reverse = {key for run in slot.runs + slot.previous for key in split(run)}
            held = {key for key, holders in self._holders.items() if holders.mask & flag}
            assert held <= reverse
            assert len(held) == slot.num_held
        masks = {holders.mask for holders in self._holders.values()}
        assert all(mask and not mask & ~known for mask in masks)
        assert not known & sum(self._free_flags)
        assert self._table.alive == sum(slot.flag for slot in self._by_node.values())
