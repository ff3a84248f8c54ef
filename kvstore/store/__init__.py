"""The blocks of one node in all its tiers: the engine's pool, host memory, disk."""

from moonpool.kvstore.store.reader import DiskWait, Lease
from moonpool.kvstore.store.reservation import Reservation
from moonpool.kvstore.store.tiered import TieredStore
from moonpool.kvstore.tiers.protocols import Bytes

__all__ = ["Bytes", "DiskWait", "Lease", "Reservation", "TieredStore"]
