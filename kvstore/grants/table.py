"""The grants that a process has given: which of its slots others may read or write, and until when."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import SystemRandom

from moonpool.kvstore.blocks.tier import Tier

Slot = tuple[Tier, int]


@dataclass(slots=True, eq=False)
class Grant:
    """``slots`` serve nothing else before the grant has ended: its holder may rely on that for ``granted_s``
    after its request, by its own clock (see ``HeldGrant``). ``end(lapsed)`` is called once, when it ends."""

    id: int
    owner: str  # for messages
    slots: list[Slot]
    generations: list[int]  # of the slots
    granted_s: float  # as granted last
    expires_s: float
    end: Callable[[bool], None]


class GrantTable:
    """Grants by id. A grant ends when its holder releases it, or when ``sweep`` finds it expired: a lost
    connection is no reason, because the holder may still read or write. One event loop."""

    def __init__(
        self, generation: Callable[[Slot], int], *, longest_s: float, clock: Callable[[], float]
    ) -> None:
        """``generation(slot)`` changes when the slot gets other content. ``longest_s``: of any grant."""
        self._generation = generation
        self._longest_s = longest_s
        self._clock = clock
        self._grants: dict[int, Grant] = {}
        # Ids must not be guessed: they end grants.
        self._rng = SystemRandom()

    def __len__(self) -> int:
        return len(self._grants)

    def grant(self, owner: str, slots: Sequence[Slot], ttl_s: float, end: Callable[[bool], None]) -> Grant:
        """Grant slots that the caller keeps as they are until ``end``, for ``ttl_s`` at most."""
        granted_s = min(ttl_s, self._longest_s)
        grant_id = self._rng.getrandbits(63) | 1
        grant = Grant(grant_id, owner, [], [], granted_s, self._clock() + granted_s, end)
        self._grants[grant_id] = grant
        self.extend(grant, slots)
        return grant

    def extend(self, grant: Grant, slots: Sequence[Slot]) -> None:
        """The grant is also of these slots from now on."""
        grant.slots += slots
        grant.generations += map(self._generation, slots)

    def change(self, grant: Grant, slots: Sequence[Slot]) -> None:
        """The grant is of these slots from now on."""
        grant.slots, grant.generations = [], []
        self.extend(grant, slots)

    def now_s(self) -> float:
        """By the clock of ``Grant.expires_s``."""
        return self._clock()

    def renew(self, grant_id: int, ttl_s: float) -> float:
        """Prolong a grant; returns for how many seconds from now on, 0 if it has ended."""
        grant = self._grants.get(grant_id)
        if grant is None:
            return 0.0
        grant.granted_s = min(ttl_s, self._longest_s)
        grant.expires_s = max(grant.expires_s, self._clock() + grant.granted_s)
        return grant.granted_s

    def release(self, grant_id: int) -> None:
        """End a grant. Idempotent; a lapsed or unknown one is no error."""
        self._end(grant_id, lapsed=False)

    def sweep(self) -> int:
        """End the grants that have expired; returns how many. Call it regularly: a dead holder never
        releases."""
        now_s = self._clock()
        lapsed = [grant.id for grant in self._grants.values() if grant.expires_s <= now_s]
        for grant_id in lapsed:
            self._end(grant_id, lapsed=True)
        return len(lapsed)

    def release_all(self) -> None:
        """End every grant. The slots must serve nothing else afterwards."""
        for grant_id in list(self._grants):
            self.release(grant_id)

    def _end(self, grant_id: int, *, lapsed: bool) -> None:
        grant = self._grants.pop(grant_id, None)
        if grant is not None:
            grant.end(lapsed)

    def check_integrity(self) -> None:
        """Assert that no granted slot has got other content."""
        for grant in self._grants.values():
            now = [self._generation(slot) for slot in grant.slots]
            assert now == grant.generations, f"a slot granted to {grant.owner} was reused"
