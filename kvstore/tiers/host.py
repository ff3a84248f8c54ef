"""Blocks in host memory: one arena of slots, each a block's bytes with their checksum."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from xxhash import xxh3_64_intdigest

from moonpool.kvstore.blocks.keys import BlockKey
from moonpool.kvstore.blocks.layout import BlockFormat
from moonpool.kvstore.errors import LayoutError
from moonpool.kvstore.eviction import make_policy
from moonpool.kvstore.eviction.chain_cache import ChainCache
from moonpool.kvstore.eviction.savings import SavedSeconds
from moonpool.kvstore.tiers.protocols import Bytes


class HostTier(ChainCache[BlockKey]):
    """A ``ChainCache`` with slot ``i`` at ``memory[i * block_nbytes : (i + 1) * block_nbytes]``.

    Everything runs on one thread. ``match`` pins nothing; a reader pins a slot before it awaits anything.
    Blocks are immutable: a slot's bytes change only after its block is gone and unpinned.
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

        ``saved_s``: what hits are worth to the policy. Raises ``LayoutError``: not one block fits.
        """
        nbytes = layout.block_nbytes
        num_blocks = memory.nbytes // nbytes
        if num_blocks == 0:
            raise LayoutError(f"{memory.nbytes} bytes of host memory hold no block of {nbytes} bytes")
        super().__init__(num_blocks, make_policy(policy, num_blocks, saved_s), on_evicted=on_evicted)
        self.layout = layout
        self._memory = memory.reshape(-1)[: num_blocks * nbytes].reshape(num_blocks, nbytes)
        self._checksums = np.zeros(num_blocks, dtype=np.uint64)
        self._generations = np.zeros(num_blocks, dtype=np.uint64)

    def bytes_of(self, slot: int) -> Bytes:
        """uint8 [block_nbytes], a view."""
        view: Bytes = self._memory[slot]
        return view

    def offset_of(self, slot: int) -> int:
        """Where in ``memory`` the slot begins, in bytes: what a peer's span names."""
        return slot * self.layout.block_nbytes

    def generation_of(self, slot: int) -> int:
        """It changes when the slot is reserved for another block."""
        return int(self._generations[slot])

    def reserve(
        self, key: BlockKey, parent: BlockKey | None, *, held_elsewhere: bool = False, wanted: bool = False
    ) -> int | None:
        slot = super().reserve(key, parent, held_elsewhere=held_elsewhere, wanted=wanted)
        if slot is not None:
            self._generations[slot] += np.uint64(1)
        return slot

    def checksum_of(self, slot: int) -> int:
        """xxh3-64 of the bytes as they were put."""
        return int(self._checksums[slot])

    def is_intact(self, slot: int) -> bool:
        """Whether the slot's bytes still match their checksum."""
        return xxh3_64_intdigest(self._memory[slot].data) == self.checksum_of(slot)

    def fill(self, slot: int, key: BlockKey, parent: BlockKey | None, checksum: int) -> int:
        """``commit`` a reserved slot that has been filled. Returns the slot with the block."""
        carrier = self.commit(slot, key, parent)
        if carrier == slot:
            self._checksums[slot] = checksum
        return carrier
