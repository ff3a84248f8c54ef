"""The planner in virtual time: the conductor's function decides, and nodes join and leave."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from moonpool.conductor.fleet.removal import Removable, Reuse
from moonpool.conductor.observing.demand import DemandCounter
from moonpool.conductor.observing.slo import Slo
from moonpool.conductor.planning.observation import Nodes, observe
from moonpool.conductor.planning.plan import ADD, REMOVE, SWITCH, Memory, RoleState, plan
from moonpool.conductor.planning.window import DemandWindow
from moonpool.simulator.cluster.clock import Clock
from moonpool.simulator.cluster.membership import Cluster
from moonpool.simulator.inputs.scenario import Elastic


@dataclass(frozen=True, slots=True)
class Change:
    """A node was asked for (``add``), told to leave (``remove``) or to change its role (``switch``)."""

    at_s: float
    kind: str
    role: str


@dataclass(frozen=True, slots=True)
class Shortage:
    """From ``began_s`` to ``ended_s`` fewer nodes of a role served than the load needed."""

    role: str
    began_s: float
    ended_s: float


class Shortages:
    """The shortages that have ended, in ``ended``, of what ``look`` was told of."""

    def __init__(self) -> None:
        self.ended: list[Shortage] = []
        self._since_s: dict[str, float] = {}  # by role

    def look(self, role: str, is_short: bool, now_s: float) -> None:
        if is_short:
            self._since_s.setdefault(role, now_s)
        elif role in self._since_s:
            self.ended.append(Shortage(role, self._since_s.pop(role), now_s))


class ElasticFleet:
    """Plans every ``elastic.period_s`` while ``has_open_requests()``."""

    def __init__(
        self,
        elastic: Elastic,
        slo: Slo,
        cluster: Cluster,
        clock: Clock,
        demand: DemandCounter,
        *,
        has_open_requests: Callable[[], bool],
    ) -> None:
        self.changes: list[Change] = []
        self.shortages = Shortages()
        self.history: list[tuple[float, int, int]] = []  # time, prefill and decode nodes that serve
        self.reuse: dict[str, Reuse] = {}  # by node
        self._elastic = elastic
        self._slo = slo
        self._cluster = cluster
        self._clock = clock
        self._demand = demand
        self._has_open_requests = has_open_requests
        self._window = DemandWindow()
        self._memory = Memory()
        self._starting = {"prefill": 0, "decode": 0}
        clock.at(clock.now_s, self._round)

    def used(self, node_id: str, num_tokens: float) -> None:
        """A request used cached blocks of a node."""
        self.reuse.setdefault(node_id, Reuse()).add(num_tokens, self._clock.now_s)

    def _round(self) -> None:
        cluster, now_s, rules = self._cluster, self._clock.now_s, self._elastic.rules
        self._window.add(now_s, self._demand.total)
        for view in cluster.decode:
            cluster.nodes[view.node_id].refresh()
        seen = observe(
            self._nodes("prefill"), self._nodes("decode"), self._window, self._slo, rules.attained, now_s
        )
        self.history.append((now_s, len(cluster.prefill), len(cluster.decode)))
        for role, state in seen.roles.items():
            needed = min(state.need.nodes, rules.bounds[role].most)
            self.shortages.look(role, state.num_ready < needed, now_s)
        decided, self._memory = plan(seen.roles, rules, self._memory, now_s)
        for step in decided.steps:
            self.changes.append(Change(now_s, step.kind, step.role))
            if step.kind == ADD:
                self._starting[step.role] += 1
                self._clock.at(now_s + self._elastic.join_s, self._joined, step.role, now_s)
            elif step.kind == REMOVE:
                cluster.retire(cluster.nodes[step.node_id])
            elif step.kind == SWITCH:
                cluster.switch(cluster.nodes[step.node_id], step.to_role)
        if self._has_open_requests():
            self._clock.at(now_s + self._elastic.period_s, self._round)

    def _nodes(self, role: str) -> Nodes:
        table, now_s = self._cluster.prefill if role == "prefill" else self._cluster.decode, self._clock.now_s
        ready = [
            Removable(
                view.node_id,
                num_requests=len(self._cluster.nodes[view.node_id].jobs),
                reused=self.reuse[view.node_id].total(now_s) if view.node_id in self.reuse else 0.0,
            )
            for view in table
        ]
        state = RoleState(ready, self._starting[role], join_s=self._elastic.join_s, switchable=ready)
        return Nodes(table, state)

    def _joined(self, role: str, ordered_s: float) -> None:
        self._starting[role] -= 1
        self._cluster.join(role, ordered_s)
