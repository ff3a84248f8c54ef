"""The blocks of one node over all its tiers: the engine's pool, host memory, disk."""

from kvstore.store.leases import Lease, Pinned
from kvstore.store.reservation import Reservation
from kvstore.store.stats import StoreStats, TierStats
from kvstore.store.tiered_store import TieredStore
from kvstore.store.tiers import Bytes, DiskTier, PoolTier

__all__ = [
    "Bytes",
    "DiskTier",
    "Lease",
    "Pinned",
    "PoolTier",
    "Reservation",
    "StoreStats",
    "TierStats",
    "TieredStore",
]
