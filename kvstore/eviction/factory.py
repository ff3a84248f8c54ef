"""Policies by name."""

from __future__ import annotations

from collections.abc import Callable

from moonpool.kvstore.errors import StoreError
from moonpool.kvstore.eviction.frequency import LengthAware, Lfu
from moonpool.kvstore.eviction.lru import Lru, S3Fifo, Sieve
from moonpool.kvstore.eviction.policy import EvictionPolicy
from moonpool.kvstore.eviction.prefix import Prefix
from moonpool.kvstore.eviction.savings import SavedSeconds

POLICIES: dict[str, Callable[[int], EvictionPolicy]] = {
    "lru": Lru,
    "lfu": Lfu,
    "length-aware": LengthAware,
    "s3fifo": S3Fifo,
    "sieve": Sieve,
    "prefix": Prefix,
}


def make_policy(name: str, capacity_blocks: int, saved_s: SavedSeconds | None = None) -> EvictionPolicy:
    """The policy called ``name`` for a tier of ``capacity_blocks``. ``saved_s``: what hits are worth, for the
    policy that asks (``prefix``); None: all the same.

    Raises ``StoreError`` for another name.
    """
    if name not in POLICIES:
        raise StoreError(f"eviction policy must be one of {', '.join(POLICIES)}, got {name!r}")
    if name == "prefix":
        return Prefix(capacity_blocks, saved_s)
    return POLICIES[name](capacity_blocks)
