"""Blocks held for peers that read them, until they say so or their time is up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.block_pool import BlockPool
from kvstore.keys import BlockKey


@dataclass(frozen=True, slots=True)
class _Lease:
    block_ids: list[int]
    expires_s: float


class Leases:
    """Who may read which blocks. ``sweep`` must be called now and then: a dead reader never releases."""

    def __init__(self, pool: BlockPool, *, longest_s: float, clock: Callable[[], float]) -> None:
        self._pool = pool
        self._longest_s = longest_s
        self._clock = clock
        self._leases: dict[int, _Lease] = {}
        self._last_id = 0

    def __len__(self) -> int:
        return len(self._leases)

    def grant(self, keys: Sequence[BlockKey], ttl_s: float) -> tuple[int, list[int]]:
        """Hold the longest prefix of ``keys`` for ``ttl_s`` at most; returns the lease's id and the blocks.

        The id is 0, and nothing is held, where not even the first block is here.
        """
        block_ids = self._pool.match(keys)
        if not block_ids:
            return 0, []
        self._pool.acquire(block_ids)
        self._last_id += 1
        expires_s = self._clock() + min(ttl_s, self._longest_s)
        self._leases[self._last_id] = _Lease(block_ids, expires_s)
        return self._last_id, block_ids

    def release(self, lease_id: int) -> None:
        """Let the blocks of a lease go. Releasing twice, or after it lapsed, does nothing."""
        lease = self._leases.pop(lease_id, None)
        if lease is not None:
            self._pool.release(lease.block_ids)

    def sweep(self) -> int:
        """Release what has lapsed; returns how many leases."""
        now_s = self._clock()
        lapsed = [lease_id for lease_id, lease in self._leases.items() if lease.expires_s <= now_s]
        for lease_id in lapsed:
            self.release(lease_id)
        return len(lapsed)

    def release_all(self) -> None:
        for lease_id in list(self._leases):
            self.release(lease_id)
