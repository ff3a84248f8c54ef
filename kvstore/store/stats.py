"""What a store says of itself."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TierStats:
    """One tier now. ``capacity_blocks`` is 0 where the tier grows as it likes."""

    name: str  # "host", "ssd"
    capacity_blocks: int
    num_blocks: int
    num_pinned: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class StoreStats:
    tiers: list[TierStats]
    num_leases: int
    num_queued_writes: int  # blocks that wait to be written to disk
    num_leaving: int  # of those, blocks evicted from host memory that keep their slot until then
    num_promoting: int  # blocks on their way from disk to host memory
    host_load_nbytes_per_s: float  # as measured lately; 0: not known
    ssd_load_nbytes_per_s: float
