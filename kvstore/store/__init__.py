"""The blocks of one node in all its tiers: the engine's pool, host memory, disk."""

from moonpool.kvstore.store.reader import DiskWait, Lease, Pinned
from moonpool.kvstore.store.reservation import Reservation
from moonpool.kvstore.store.tiered import StoreStats, TieredStore, TierStats
from moonpool.kvstore.tiers.protocols import Bytes, DiskTier, PoolTier

__all__ = [
    "Bytes",
    "DiskTier",
    "DiskWait",
    "Lease",
    "Pinned",
    "PoolTier",
    "Reservation",
    "StoreStats",
    "TierStats",
    "TieredStore",
]
