"""Which members requests may go to, by role: kept as members change, so that no decision goes through all."""

from __future__ import annotations

from moonpool.conductor.fleet.member import Member
from moonpool.conductor.placing.node_table import NodeTable
from moonpool.kvstore.index.redis.node_record import ROLES


class EligibleNodes:
    """For each role the members that take requests, those that are spared while there are others, and the
    unhealthy, which serve only where nobody else does: better than to refuse everything.
    """

    def __init__(self) -> None:
        self._open = {role: NodeTable() for role in ROLES}
        self._spared = {role: NodeTable() for role in ROLES}
        self._unhealthy = {role: NodeTable() for role in ROLES}
        self._resting: set[Member] = set()  # whose breaker will close without a word

    def put(self, member: Member, now_s: float) -> None:
        """Anything about ``member`` has changed, or it is new."""
        role = member.record.role
        if role not in self._open:
            return
        wanted = None
        if member.available(now_s):
            kind = self._unhealthy if not member.healthy else self._open if member.has_room else self._spared
            wanted = kind[role]
            self._resting.discard(member)
        elif not member.breaker.closed(now_s):
            self._resting.add(member)
        for fleet in (self._open[role], self._spared[role], self._unhealthy[role]):
            if member.view in fleet:
                if fleet is wanted:
                    fleet.touch(member.view)
                    return
                fleet.remove(member.view)
        if wanted is not None:
            wanted.add(member.view)

    def drop(self, member: Member) -> None:
        """It gets no more requests. Idempotent."""
        self._resting.discard(member)
        for fleets in (self._open, self._spared, self._unhealthy):
            fleet = fleets.get(member.record.role)
            if fleet is not None and member.view in fleet:
                fleet.remove(member.view)

    def of(self, role: str, now_s: float) -> NodeTable:
        """The members of a role that take requests, or else those that are spared, or else the unhealthy;
        empty: there is none.
        """
        if self._resting:
            for member in [member for member in self._resting if member.breaker.closed(now_s)]:
                self.put(member, now_s)
        return next(
            (kind[role] for kind in (self._open, self._spared) if len(kind[role])), self._unhealthy[role]
        )

    def count(self, role: str, now_s: float) -> int:
        """How many could get requests."""
        self.of(role, now_s)
        return len(self._open[role]) + len(self._spared[role]) or len(self._unhealthy[role])
