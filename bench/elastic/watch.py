"""What a live fleet did, from looks at it: the same figures as of a simulated one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moonpool.bench.elastic.fleets import HOUR_S, Result
from moonpool.conductor.fleet.providers.provider import RUNNING, STARTING, STOPPING
from moonpool.conductor.planning.plan import ADD, REMOVE, SWITCH
from moonpool.simulator.cluster.elastic_fleet import Change, Shortages

_STAYS = (RUNNING, STARTING)
_PAID = (*_STAYS, STOPPING)


class Watch:
    """Fed by ``look``. ``node_s``: seconds of nodes that were there; ``most``: of them at a time. ``join_s``:
    how long the slowest of them took to join."""

    def __init__(self, began_s: float, ceilings: Mapping[str, int]) -> None:
        """``ceilings``: the most nodes of each role that are allowed: more than that are never missing."""
        self.node_s = 0.0
        self.most = 0
        self.join_s = 0.0
        self.num_replaced = 0
        self._began_s = self._now_s = began_s
        self._ceilings = ceilings
        self._roles: dict[str, str] = {}  # of the nodes that are to stay
        self._changes: list[Change] = []
        self._shortages = Shortages()
        self._history: list[tuple[float, int, int]] = []

    def look(self, fleet: Mapping[str, Any], now_s: float) -> None:
        """``fleet``: of ``GET /v1/fleet``; what is there now has been since the last look."""
        at_s = now_s - self._began_s
        # Those that no provider started are there all the time.
        states = [one["supplied"]["state"] if one["supplied"] else RUNNING for one in fleet["nodes"]]
        num_paid = sum(state in _PAID for state in states)
        self.node_s += num_paid * (now_s - self._now_s)
        self.most, self._now_s = max(self.most, num_paid), now_s
        stay = [one for one, state in zip(fleet["nodes"], states, strict=True) if state in _STAYS]
        roles = {one["node_id"]: one["role"] for one in stay}
        if self._history:
            self._note(roles, at_s)
        self._roles = roles
        planned = fleet["planner"]["roles"]
        prefill, decode = (planned[role]["ready"] if role in planned else 0 for role in ("prefill", "decode"))
        self._history.append((at_s, prefill, decode))
        self.join_s = max((state["join_s"] for state in planned.values()), default=0.0)
        for role, state in planned.items():
            self._shortages.look(role, state["ready"] < min(state["needed"], self._ceilings[role]), at_s)

    def result(self, attained: float) -> Result:
        """``attained``: the fraction of requests within the SLO."""
        return Result(
            attained,
            self.node_s / HOUR_S,
            self._now_s - self._began_s,
            (),
            self.num_replaced,
            self._changes,
            self._shortages.ended,
            self._history,
        )

    def _note(self, roles: Mapping[str, str], at_s: float) -> None:
        former = self._roles
        self._changes += [Change(at_s, ADD, role) for name, role in roles.items() if name not in former]
        self._changes += [Change(at_s, REMOVE, role) for name, role in former.items() if name not in roles]
        self._changes += [
            Change(at_s, SWITCH, role)
            for name, role in former.items()
            if name in roles and roles[name] != role
        ]
