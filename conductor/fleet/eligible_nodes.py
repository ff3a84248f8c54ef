"""The members that requests may go to, by role; updated as members change, not per decision."""

from __future__ import annotations

from moonpool.conductor.fleet.member import Member
from moonpool.conductor.placing.node_table import NodeTable
from moonpool.kvstore.index.redis.node_record import ROLES


class EligibleNodes:
    """Per role: open members, members that warm up and have enough, and unhealthy members. Each group is used
    only when the groups before it are empty.
    """

    def __init__(self) -> None:
        self._open = {role: NodeTable() for role in ROLES}
        self._warming = {role: NodeTable() for role in ROLES}
        self._unhealthy = {role: NodeTable() for role in ROLES}
        self._resting: set[Member] = set()  # with an open breaker, which closes by time

    def put(self, member: Member, now_s: float) -> None:
        """``member`` is new, or has changed."""
        role = member.record.role
        if role not in self._open:
            return
        wanted = None
        if member.available(now_s):
            kind = self._unhealthy if not member.healthy else self._open if member.has_room else self._warming
            wanted = kind[role]
            self._resting.discard(member)
        elif not member.breaker.closed(now_s):
            self._resting.add(member)
        for fleet in (self._open[role], self._warming[role], self._unhealthy[role]):
            if member.view in fleet:
                if fleet is wanted:
                    fleet.touch(member.view)
                    return
                fleet.remove(member.view)
        if wanted is not None:
            wanted.add(member.view)

    def drop(self, member: Member) -> None:
        """``member`` gets no more requests. Idempotent."""
        self._resting.discard(member)
        for fleets in (self._open, self._warming, self._unhealthy):
            fleet = fleets.get(member.record.role)
            if fleet is not None and member.view in fleet:
                fleet.remove(member.view)

    def of(self, role: str, now_s: float) -> NodeTable:
        """The first group of a role with members; empty: there are none."""
        if self._resting:
            for member in [member for member in self._resting if member.breaker.closed(now_s)]:
                self.put(member, now_s)
        return next(
            (kind[role] for kind in (self._open, self._warming) if len(kind[role])), self._unhealthy[role]
        )

    def count(self, role: str, now_s: float) -> int:
        """Number of members that could get requests."""
        self.of(role, now_s)
        return len(self._open[role]) + len(self._warming[role]) or len(self._unhealthy[role])
