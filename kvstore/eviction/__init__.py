"""Eviction policies: the order in which a full tier gives up its blocks."""

from __future__ import annotations

from collections.abc import Callable

from moonpool.kvstore.errors import StoreError
from moonpool.kvstore.eviction.lru import Lru
from moonpool.kvstore.eviction.policy import EvictionPolicy
from moonpool.kvstore.eviction.prefix import Prefix
from moonpool.kvstore.eviction.savings import SavedSeconds

__all__ = ["POLICIES", "EvictionPolicy", "make_policy"]

POLICIES: dict[str, Callable[[int], EvictionPolicy]] = {"lru": Lru, "prefix": Prefix}


def make_policy(name: str, capacity_blocks: int, saved_s: SavedSeconds | None = None) -> EvictionPolicy:
    """Return the policy called ``name`` for a tier of ``capacity_blocks``.

    ``saved_s``: the seconds that hits save, for ``prefix``; None: every hit saves the same.
    Raises ``StoreError`` for an unknown name.
    """
    if name not in POLICIES:
        raise StoreError(f"eviction policy must be one of {', '.join(POLICIES)}, got {name!r}")
    if name == "prefix":
        return Prefix(capacity_blocks, saved_s)
    return POLICIES[name](capacity_blocks)
