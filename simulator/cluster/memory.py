"""The KV blocks of a node in their tiers: the product's bookkeeping and policies, without the bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from moonpool.kvstore.blocks.tier import Tier
from moonpool.kvstore.eviction import make_policy
from moonpool.kvstore.eviction.chain_cache import ChainCache
from moonpool.simulator.cluster.reality import NodeIndex

# The key of a reserved slot without one: the partial last block of a prompt, or generated tokens.
_NAMELESS = b""


@dataclass(slots=True, eq=False)
class PinnedBlocks:
    """A request's slots in a pool: pinned blocks of its chain's start, and reserved slots after them."""

    keys: list[bytes] = field(default_factory=list)  # of the pinned ones
    pinned: list[int] = field(default_factory=list)
    reserved: list[int] = field(default_factory=list)


class NodeMemory:
    """A pool, and optional tiers in host memory and on SSD. Evicted blocks move to the next tier.

    ``index`` has each block under its fastest tier. The blocks held of a chain are a prefix of it.
    """

    def __init__(
        self,
        index: NodeIndex,
        parents: Mapping[bytes, bytes],
        *,
        blocks: Sequence[int],
        policies: Sequence[str],
    ) -> None:
        """``blocks`` and ``policies``: of pool, host and SSD; 0: no such tier. ``parents``: key to the key
        before it.
        """
        self._index = index
        self._parents = parents
        self._tiers: dict[Tier, ChainCache[bytes]] = {}
        for tier, capacity, policy in zip(Tier, blocks, policies, strict=True):
            if capacity:
                self._tiers[tier] = ChainCache(
                    capacity, make_policy(policy, capacity), on_evicted=self._demoter(tier)
                )
        self.pool = self._tiers[Tier.POOL]
        self._num_reserved = 0

    @property
    def has_lower_tiers(self) -> bool:
        return len(self._tiers) > 1

    @property
    def num_available(self) -> int:
        """Slots of the pool that are neither pinned nor reserved; they may hold cached blocks."""
        return self.pool.capacity - self.pool.num_pinned - self._num_reserved

    def match(self, keys: Sequence[bytes]) -> list[Tier]:
        """Return the tier of each block of the longest prefix held. Does not count as a use."""
        found = [Tier.POOL] * len(self.pool.match(keys))
        if self.has_lower_tiers:
            for key in keys[len(found) :]:
                tier = self._fastest(key)
                if tier is None:
                    break
                found.append(tier)
        return found

    def holds(self, key: bytes) -> bool:
        """Whether any tier has the block."""
        return self._fastest(key) is not None

    def use(self, keys: Sequence[bytes]) -> None:
        """Tell the lower tiers' policies that a request uses this chain. ``release`` tells the pool's."""
        for tier, cache in self._tiers.items():
            if tier is not Tier.POOL:
                cache.use(keys)

    # ------------------------------------------------------------------ holding

    def pin(self, hold: PinnedBlocks, keys: Sequence[bytes]) -> int:
        """Pin the pool's part of the prefix ``keys``; returns the number of blocks pinned in all."""
        slots = self.pool.match(keys)
        fresh = slots[len(hold.pinned) :]
        self.pool.pin(fresh)
        hold.keys += keys[len(hold.pinned) : len(slots)]
        hold.pinned += fresh
        return len(hold.pinned)

    def reserve(self, hold: PinnedBlocks, keys: Sequence[bytes], num_blocks: int) -> bool:
        """Reserve ``num_blocks`` more slots, the first for ``keys``. False: no room, nothing changed."""
        if num_blocks > self.num_available:
            return False
        for i in range(num_blocks):
            key = keys[i] if i < len(keys) else _NAMELESS
            slot = self.pool.reserve(key, self._parents.get(key))
            assert slot is not None, "the pool's policy refused a block that is needed"
            hold.reserved.append(slot)
            self._num_reserved += 1
        return True

    def commit(self, hold: PinnedBlocks, keys: Sequence[bytes]) -> None:
        """Publish ``keys`` in the first reserved slots, which become pinned."""
        slots, hold.reserved = hold.reserved[: len(keys)], hold.reserved[len(keys) :]
        self._num_reserved -= len(slots)
        for slot, key in zip(slots, keys, strict=True):
            carrier = self.pool.commit(slot, key, self._parents.get(key))
            self.pool.pin((carrier,))
            hold.pinned.append(carrier)
        hold.keys += keys
        if keys:
            self._index.store(b"".join(keys), Tier.POOL)

    def bring(self, hold: PinnedBlocks, keys: Sequence[bytes]) -> int:
        """Pin blocks of ``keys`` that arrived from a lower tier or another node, as far as there is room.

        Returns the number of blocks pinned in all.
        """
        self.pin(hold, keys)
        rest = keys[len(hold.pinned) :]
        count = min(len(rest), self.num_available)
        if count and self.reserve(hold, rest, count):
            self.commit(hold, rest[:count])
        return len(hold.pinned)

    def release(self, hold: PinnedBlocks) -> None:
        """Unpin the blocks, which stay cached, and free the reserved slots."""
        self.pool.use(hold.keys)
        self.pool.unpin(hold.pinned)
        for slot in hold.reserved:
            self.pool.abandon(slot)
        self._num_reserved -= len(hold.reserved)
        hold.keys, hold.pinned, hold.reserved = [], [], []

    def drop(self, keys: Sequence[bytes], num_blocks: int) -> int:
        """Drop the pool's copies of the last ``num_blocks`` of ``keys``, from the end, until one is in use.

        Returns the number dropped.
        """
        num_dropped = 0
        for key in reversed(keys[len(keys) - num_blocks :]):
            slot = self.pool.slot_of(key)
            if slot is None or self.pool.is_pinned(slot) or self.pool.after(key):
                break
            self.pool.remove(key)
            self._demote(Tier.POOL, key)
            num_dropped += 1
        return num_dropped

    # ------------------------------------------------------------------ tiers

    def _demoter(self, tier: Tier) -> Callable[[bytes, int], None]:
        def demote(key: bytes, _: int) -> None:
            self._demote(tier, key)

        return demote

    def _demote(self, source: Tier, key: bytes) -> None:
        """Move a block that ``source`` has evicted to the next tier that takes it."""
        for tier, cache in self._tiers.items():
            if tier > source and (key in cache or cache.add(key, self._parents.get(key)) is not None):
                if self._fastest(key, source) == tier:
                    self._index.store(key, tier)
                return
        if self._fastest(key, source) is None:
            self._index.remove(key)

    def _fastest(self, key: bytes, without: Tier | None = None) -> Tier | None:
        for tier, cache in self._tiers.items():
            if tier != without and key in cache:
                return tier
        return None

    def check_integrity(self) -> None:
        for cache in self._tiers.values():
            cache.check_integrity()
            assert len(cache) <= cache.capacity
        held = set().union(*(cache.keys() for cache in self._tiers.values()))
        assert self._index.held() == held, "the index names other blocks than are held"
        for key in held:
            parent = self._parents.get(key)
            assert parent is None or parent in held, "a block without the one before it"
