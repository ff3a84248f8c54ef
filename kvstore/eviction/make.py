"""Policies by name."""

from __future__ import annotations

from collections.abc import Callable

from kvstore.errors import StoreError
from kvstore.eviction.frequency import LengthAware, Lfu
from kvstore.eviction.policy import EvictionPolicy
from kvstore.eviction.prefix import Prefix
from kvstore.eviction.recency import Lru, S3Fifo, Sieve

POLICIES: dict[str, Callable[[int], EvictionPolicy]] = {
    "lru": Lru,
    "lfu": Lfu,
    "length-aware": LengthAware,
    "s3fifo": S3Fifo,
    "sieve": Sieve,
    "prefix": Prefix,
}


def make_policy(name: str, capacity_blocks: int) -> EvictionPolicy:
    """The policy called ``name`` for a tier of ``capacity_blocks``. Raises ``StoreError`` for another
    name."""
    if name not in POLICIES:
        raise StoreError(f"eviction policy must be one of {', '.join(POLICIES)}, got {name!r}")
    return POLICIES[name](capacity_blocks)
