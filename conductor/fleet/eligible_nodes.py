"""The nodes that requests may go to, by stage; updated as nodes change, not per decision.

Live and simulated nodes are chosen here alike.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Protocol

from moonpool.conductor.admission.tenants import EVERYWHERE, Regions, may_hold
from moonpool.conductor.fleet.circuit_breaker import CircuitBreaker
from moonpool.conductor.placing.node_table import NodeTable
from moonpool.conductor.placing.node_view import NodeView
from moonpool.kvstore.index.redis.node_record import STAGES

_OPEN, _WARMING, _UNHEALTHY = range(3)


class Candidate(Protocol):
    """A node: ``Member``, or a simulated one."""

    breaker: CircuitBreaker
    view: NodeView

    @property
    def stages(self) -> tuple[str, ...]: ...
    @property
    def healthy(self) -> bool: ...
    @property
    def has_room(self) -> bool: ...
    def available(self, now_s: float) -> bool: ...


class EligibleNodes:
    """Per stage: open members, members that warm up and have enough, and unhealthy members. Each group is
    used only when the groups before it are empty.
    """

    def __init__(self) -> None:
        self._groups = {stage: [NodeTable(), NodeTable(), NodeTable()] for stage in STAGES}
        self._places: dict[
            Candidate, tuple[tuple[str, ...], int | None]
        ] = {}  # stages, and position in their groups
        self._resting: dict[Candidate, None] = {}  # with an open breaker, which closes by time

    def put(self, member: Candidate, now_s: float) -> None:
        """``member`` is new, or has changed, maybe its role."""
        stages = member.stages
        wanted = None
        if member.available(now_s):
            wanted = _UNHEALTHY if not member.healthy else _OPEN if member.has_room else _WARMING
            self._resting.pop(member, None)
        elif stages and not member.breaker.closed(now_s):
            self._resting[member] = None
        place = (stages, wanted)
        if self._places.get(member) == place:
            if wanted is not None:  # as after most steps of a node
                for stage in stages:
                    self._groups[stage][wanted].touch(member.view)
            return
        self._places[member] = place
        for stage, groups in self._groups.items():
            _move(member, groups, wanted if stage in stages else None)

    def drop(self, member: Candidate) -> None:
        """``member`` gets no more requests. Idempotent."""
        self._resting.pop(member, None)
        if self._places.pop(member, None) is None:
            return
        for groups in self._groups.values():
            _move(member, groups, None)

    def of(self, stage: str, now_s: float, avoid: Collection[str] = ()) -> NodeTable:
        """The first group of a stage with members other than those to ``avoid``; without one, the first with
        members; empty: there are none."""
        if self._resting:
            for member in [member for member in self._resting if member.breaker.closed(now_s)]:
                self.put(member, now_s)
        groups = [group for group in self._groups[stage] if len(group)]
        if avoid:
            for group in groups:
                if len(group) > len(avoid) or any(node.node_id not in avoid for node in group):
                    return group
        return groups[0] if groups else self._groups[stage][_UNHEALTHY]

    def serving(self, stage: str, now_s: float) -> list[NodeView]:
        """Open members and those that warm up; without any, unhealthy ones."""
        self.of(stage, now_s)
        is_open, warming, unhealthy = self._groups[stage]
        return [*is_open, *warming] or [*unhealthy]

    def count(self, stage: str, now_s: float) -> int:
        """Number of members that could get requests."""
        self.of(stage, now_s)
        num_open, num_warming, num_unhealthy = map(len, self._groups[stage])
        return num_open + num_warming or num_unhealthy


class EligibleByRegions:
    """The eligible nodes of the whole cluster, and of each set of regions that tenants are confined to."""

    def __init__(self) -> None:
        self._nodes = {EVERYWHERE: EligibleNodes()}

    def put(self, member: Candidate, now_s: float) -> None:
        """As ``EligibleNodes.put``."""
        for regions, nodes in self._nodes.items():
            if may_hold(regions, member.view.region):
                nodes.put(member, now_s)

    def drop(self, member: Candidate) -> None:
        """As ``EligibleNodes.drop``."""
        for nodes in self._nodes.values():
            nodes.drop(member)

    def within(self, regions: Regions, members: Iterable[Candidate], now_s: float) -> EligibleNodes:
        """The nodes in ``regions``. ``members``: all in use, read when ``regions`` are asked for first."""
        nodes = self._nodes.get(regions)
        if nodes is None:
            nodes = self._nodes[regions] = EligibleNodes()
            for member in members:
                if may_hold(regions, member.view.region):
                    nodes.put(member, now_s)
        return nodes


def _move(member: Candidate, groups: list[NodeTable], wanted: int | None) -> None:
    """Leave ``member`` only in the group at the position ``wanted``; None: in none."""
    for number, group in enumerate(groups):
        if member.view in group:
            if number == wanted:
                group.touch(member.view)
                return
            group.remove(member.view)
    if wanted is not None:
        groups[wanted].add(member.view)
