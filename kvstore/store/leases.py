"""Blocks kept in memory for a reader until it releases them or its lease expires."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import SystemRandom

from moonpool.kvstore.blocks.tier import Tier


@dataclass(frozen=True, slots=True)
class Pinned:
    """A block that stays where it is while its lease lasts."""

    tier: Tier  # POOL or HOST
    slot: int  # block of the pool, or slot of the host tier's memory
    checksum: int  # xxh3-64


@dataclass(frozen=True, slots=True)
class Lease:
    """``blocks`` are the first of the requested chain. Nothing is pinned where ``id`` is 0."""

    id: int
    expires_s: float
    blocks: list[Pinned]
    pool_blocks: list[int] = field(default_factory=list, repr=False)  # pinned, more than ``blocks`` names
    host_slots: list[int] = field(default_factory=list, repr=False)


class LeaseTable:
    """Leases by id. Call ``sweep`` regularly: a dead reader never releases."""

    def __init__(
        self, release: Callable[[Lease], None], *, longest_s: float, clock: Callable[[], float]
    ) -> None:
        self._release = release
        self._longest_s = longest_s
        self._clock = clock
        self._leases: dict[int, Lease] = {}
        # Ids must not be guessed: they end leases.
        self._rng = SystemRandom()

    def __len__(self) -> int:
        return len(self._leases)

    def grant(
        self, blocks: list[Pinned], pool_blocks: list[int], host_slots: list[int], ttl_s: float
    ) -> Lease:
        """Take over blocks that are pinned already, for ``ttl_s`` at most."""
        lease_id = self._rng.getrandbits(63) | 1
        expires_s = self._clock() + min(ttl_s, self._longest_s)
        lease = self._leases[lease_id] = Lease(lease_id, expires_s, blocks, pool_blocks, host_slots)
        return lease

    def release(self, lease_id: int) -> None:
        """End a lease. Idempotent."""
        lease = self._leases.pop(lease_id, None)
        if lease is not None:
            self._release(lease)

    def sweep(self) -> int:
        """End the leases that have expired; returns how many."""
        now_s = self._clock()
        lapsed = [lease.id for lease in self._leases.values() if lease.expires_s <= now_s]
        for lease_id in lapsed:
            self.release(lease_id)
        return len(lapsed)

    def release_all(self) -> None:
        for lease_id in list(self._leases):
            self.release(lease_id)
