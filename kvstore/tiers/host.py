"""Blocks in host memory: one arena of slots, each a block's bytes with their checksum."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from moonpool.kvstore.blocks.keys import BlockKey
from moonpool.kvstore.blocks.layout import BlockFormat
from moonpool.kvstore.errors import LayoutError
from moonpool.kvstore.eviction import make_policy
from moonpool.kvstore.eviction.chain_cache import ChainCache
from moonpool.kvstore.eviction.savings import SavedSeconds
from moonpool.kvstore.eviction.surplus_copies import SurplusCopies

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class HostTierStats:
    num_blocks: int  # slots
    num_held: int
    num_pinned: int
    num_evictions: int
    num_refusals: int  # blocks not taken because all was pinned
    num_bypassed: int  # blocks the policy thought not worth a place


class HostTier:
    """Slot ``i`` is ``memory[i * block_nbytes : (i + 1) * block_nbytes]``. Everything happens on one thread.

    ``match`` pins nothing; whoever reads a slot across an ``await`` pins it first. Blocks are immutable: a
    slot's bytes change only after its block is gone and nobody pins it.
    """

    def __init__(
        self,
        memory: Bytes,
        layout: BlockFormat,
        *,
        policy: str = "lru",
        saved_s: SavedSeconds | None = None,
        on_evicted: Callable[[BlockKey, int], None] | None = None,
    ) -> None:
        """``memory``: uint8, as many slots as fit; prefault it, a first touch costs more than a copy.
        ``saved_s``: what hits are worth to the policy. ``on_evicted(key, slot)`` is called before a slot is
        reused, its bytes still there."""
        self.layout = layout
        nbytes = layout.block_nbytes
        num_blocks = memory.nbytes // nbytes
        if num_blocks == 0:
            raise LayoutError(f"{memory.nbytes} bytes of host memory hold no block of {nbytes} bytes")
        self._memory = memory.reshape(-1)[: num_blocks * nbytes].reshape(num_blocks, nbytes)
        self._checksums = np.zeros(num_blocks, dtype=np.uint64)
        self._cache: ChainCache[BlockKey] = ChainCache(
            num_blocks, make_policy(policy, num_blocks, saved_s), on_evicted=on_evicted
        )

    # ------------------------------------------------------------------ what is here

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._cache

    def __len__(self) -> int:
        return len(self._cache)

    def keys(self) -> Iterable[BlockKey]:
        return self._cache.keys()

    def slot_of(self, key: BlockKey) -> int | None:
        return self._cache.slot_of(key)

    def match(self, keys: Sequence[BlockKey]) -> list[int]:
        """Slots of the longest run of ``keys`` held from the first on. Pins nothing, counts as no use."""
        return self._cache.match(keys)

    def bytes_of(self, slot: int) -> Bytes:
        """uint8 [block_nbytes], a view."""
        view: Bytes = self._memory[slot]
        return view

    def offset_of(self, slot: int) -> int:
        """Where in ``memory`` the slot begins, in bytes: what a peer's span names."""
        return slot * self.layout.block_nbytes

    def checksum_of(self, slot: int) -> int:
        """xxh3-64 of the bytes as they were put."""
        return int(self._checksums[slot])

    def is_intact(self, slot: int) -> bool:
        """Whether the slot's bytes still are what was put."""
        return xxh3_64_intdigest(self._memory[slot].data) == self.checksum_of(slot)

    @property
    def surplus(self) -> SurplusCopies[BlockKey]:
        """Blocks that are evicted first, once nobody asks for them: whoever puts them marks them."""
        return self._cache.surplus

    @property
    def stats(self) -> HostTierStats:
        cache = self._cache
        return HostTierStats(
            cache.capacity,
            len(cache),
            cache.num_pinned,
            cache.num_evictions,
            cache.num_refusals,
            cache.num_bypassed,
        )

    # ------------------------------------------------------------------ use

    def use(self, keys: Sequence[BlockKey]) -> int:
        """A request uses this chain: what is held of it stays longer. Returns how many blocks are held."""
        return self._cache.use(keys)

    def pin(self, slots: Iterable[int]) -> None:
        """Keep the blocks of these slots, the first of a chain as ``match`` gives them, until ``release``."""
        self._cache.pin(slots)

    def release(self, slots: Iterable[int]) -> None:
        """Undo one ``pin`` of each."""
        self._cache.unpin(slots)

    # ------------------------------------------------------------------ change

    def put(
        self,
        key: BlockKey,
        source: memoryview | Bytes,
        *,
        parent: BlockKey | None = None,
        checksum: int | None = None,
    ) -> int | None:
        """Copy a block's bytes in (``block_nbytes``; they are read before this returns). Returns its slot.

        ``parent`` is the key before it in its chain, held here or not; ``checksum`` spares computing xxh3-64.
        A key that is held already is left as it is. None: there is no place (all pinned, or the policy keeps
        what it has); then what is held here after this block is evicted, for with it missing nobody can reach
        that, and nothing else has changed.
        """
        held = self._cache.slot_of(key)
        if held is not None:
            return held
        block = np.frombuffer(source, dtype=np.uint8)
        if block.nbytes != self.layout.block_nbytes:
            raise LayoutError(f"a block has {self.layout.block_nbytes} bytes, got {block.nbytes}")
        slot = self.reserve(key, parent)
        if slot is not None:
            np.copyto(self._memory[slot], block)
            self.commit(slot, key, parent, xxh3_64_intdigest(block.data) if checksum is None else checksum)
        return slot

    def reserve(
        self,
        key: BlockKey,
        parent: BlockKey | None,
        *,
        held_elsewhere: bool = False,
        wanted: bool = False,
    ) -> int | None:
        """A slot for a writer that fills ``bytes_of(slot)`` itself; nobody finds it until ``commit``.

        None: there is no place, as for ``put``; ``wanted``: the policy is not asked.
        """
        return self._cache.reserve(key, parent, held_elsewhere=held_elsewhere, wanted=wanted)

    def commit(self, slot: int, key: BlockKey, parent: BlockKey | None, checksum: int) -> int:
        """The reserved slot holds the block ``key``. Returns the slot that carries the key now: another one
        where the same block came in meanwhile; the reserved one is free then."""
        carrier = self._cache.commit(slot, key, parent)
        if carrier == slot:
            self._checksums[slot] = checksum
        return carrier

    def abandon(self, slot: int) -> None:
        """Give a reserved slot back."""
        self._cache.abandon(slot)

    def remove(self, key: BlockKey) -> list[BlockKey]:
        """Drop a block and what follows it here. Returns the keys that went. Pinned ones keep their bytes
        until they are released, but are found no more."""
        return self._cache.remove(key)

    def parent_of(self, key: BlockKey) -> BlockKey | None:
        """The key before a held block in its chain; None for the first."""
        return self._cache.parent_of(key)

    def lineage(self, key: BlockKey) -> list[int]:
        """Slots of a held block and of what is held before it without a gap: what to pin with it."""
        return self._cache.lineage(key)

    def after(self, key: BlockKey) -> list[BlockKey]:
        """What is held here after a block, held or not, of its chain: the last first."""
        return self._cache.after(key)

    def evict(self) -> bool:
        """Evict one block, as a ``put`` into a full tier does. False, counted, when all is pinned."""
        return self._cache.evict()

    @property
    def num_free(self) -> int:
        """Slots that hold nothing."""
        return self._cache.num_free

    def check_integrity(self) -> None:
        self._cache.check_integrity()
