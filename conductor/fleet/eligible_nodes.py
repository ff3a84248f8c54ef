"""The members that requests may go to, by role; updated as members change, not per decision."""

from __future__ import annotations

from moonpool.conductor.fleet.member import Member
from moonpool.conductor.placing.node_table import NodeTable
from moonpool.kvstore.index.redis.node_record import ROLES

_OPEN, _WARMING, _UNHEALTHY = range(3)


class EligibleNodes:
    """Per role: open members, members that warm up and have enough, and unhealthy members. Each group is used
    only when the groups before it are empty.
    """

    def __init__(self) -> None:
        self._groups = {role: [NodeTable(), NodeTable(), NodeTable()] for role in ROLES}
        self._resting: set[Member] = set()  # with an open breaker, which closes by time

    def put(self, member: Member, now_s: float) -> None:
        """``member`` is new, or has changed."""
        groups = self._groups.get(member.record.role)
        if groups is None:
            return
        wanted = None
        if member.available(now_s):
            wanted = groups[_UNHEALTHY if not member.healthy else _OPEN if member.has_room else _WARMING]
            self._resting.discard(member)
        elif not member.breaker.closed(now_s):
            self._resting.add(member)
        for group in groups:
            if member.view in group:
                if group is wanted:
                    group.touch(member.view)
                    return
                group.remove(member.view)
        if wanted is not None:
            wanted.add(member.view)

    def drop(self, member: Member) -> None:
        """``member`` gets no more requests. Idempotent."""
        self._resting.discard(member)
        for group in self._groups.get(member.record.role, ()):
            if member.view in group:
                group.remove(member.view)

    def of(self, role: str, now_s: float) -> NodeTable:
        """The first group of a role with members; empty: there are none."""
        if self._resting:
            for member in [member for member in self._resting if member.breaker.closed(now_s)]:
                self.put(member, now_s)
        groups = self._groups[role]
        return next((group for group in groups if len(group)), groups[_UNHEALTHY])

    def count(self, role: str, now_s: float) -> int:
        """Number of members that could get requests."""
        self.of(role, now_s)
        num_open, num_warming, num_unhealthy = map(len, self._groups[role])
        return num_open + num_warming or num_unhealthy
