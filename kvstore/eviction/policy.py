"""The protocol of an eviction policy."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Protocol


class EvictionPolicy(Protocol):
    """Orders the keys of one tier. One thread.

    The tier evicts leaves only, so that its blocks of a chain stay a prefix: if ``victim`` names a block with
    descendants, the tier evicts the end of that chain. A policy need not know chains; ``prefix`` does, and
    names leaves.
    """

    def used(self, chain: Sequence[Hashable], num_held: int) -> None:
        """A request uses ``chain``; the tier's blocks of it are among the first ``num_held``. A lower tier
        may lack the first ones, which are in a faster tier.

        Called once per request, before its new blocks are added.
        """

    def admits(self, key: Hashable) -> bool:
        """Whether a new block is worth more than the next victim. Called only when the tier is full."""

    def added(self, key: Hashable) -> None:
        """The tier has a new block."""

    def removed(self, key: Hashable) -> None:
        """The block was evicted or removed."""

    def victim(self, can_go: Callable[[Hashable], bool]) -> Hashable | None:
        """Return the key to evict, or to evict a descendant of; None: no block can be evicted.

        ``can_go`` is false for blocks that are pinned or have pinned descendants. The key stays until
        ``removed``.
        """
