"""What a tier asks of an eviction policy."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Protocol


class EvictionPolicy(Protocol):
    """Knows every key its tier holds, and nothing of bytes. One thread.

    The tier evicts leaves only, so that what it holds of a chain stays a prefix: where ``victim`` names a
    block that others follow, the tier takes the end of that block's chain instead. So a policy need not know
    chains; one that does (``prefix``) names leaves itself.
    """

    def used(self, chain: Sequence[Hashable], num_held: int) -> None:
        """A request uses ``chain`` from its first block on; what the tier holds of it is among the first
        ``num_held``. A tier below another may lack the very first: they lie in the faster one.

        Called once a request, before its other blocks are added.
        """

    def admits(self, key: Hashable) -> bool:
        """Whether a new block is worth the place of the next victim. Asked only when the tier is full."""

    def added(self, key: Hashable) -> None:
        """The tier holds the key now; it held it not before."""

    def removed(self, key: Hashable) -> None:
        """The tier holds the key no more: it was evicted, or removed for another reason."""

    def victim(self, can_go: Callable[[Hashable], bool]) -> Hashable | None:
        """The key to evict next, or whose chain to evict from; None when nothing can go.

        ``can_go`` is false for blocks that are pinned, or followed by blocks that are. The key stays until
        ``removed`` is called.
        """
