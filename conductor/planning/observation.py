"""From views of nodes and recent demand to the state that the planner decides on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from moonpool.conductor.fleet.removal import Removable
from moonpool.conductor.observing.slo import Slo
from moonpool.conductor.placing.node_view import NodeView
from moonpool.conductor.planning.loads import (
    Need,
    decode_load,
    decode_need,
    prefill_need,
    prefill_queue_s,
)
from moonpool.conductor.planning.plan import RoleState
from moonpool.conductor.planning.window import DemandWindow, Recent

# Until a node was seen to join.
UNKNOWN_JOIN_S = 30.0


@dataclass(frozen=True, slots=True)
class Nodes:
    """The nodes of one role. ``views``: of those that requests go to, by placement's tables, one for each
    replica. ``ready``: nodes to choose removals from; ``num_fixed``: others that serve.
    ``num_starting``: asked for and not there yet. ``switchable``: of all, those that can have the other role.
    """

    views: Iterable[NodeView]
    ready: Sequence[Removable]
    num_starting: int = 0
    join_s: float = UNKNOWN_JOIN_S
    held: str = ""
    num_fixed: int = 0
    switchable: Sequence[Removable] = ()

    def state(self, need: Need, attained: float | None) -> RoleState:
        """``need``: in replicas."""
        num_nodes = max(len(self.ready) + self.num_fixed, 1)
        replicas = max(round(len(list(self.views)) / num_nodes), 1)
        need = Need(-(-need.nodes // replicas), need.why)
        return RoleState(
            self.ready,
            self.num_starting,
            need,
            attained,
            self.join_s,
            self.held,
            self.num_fixed,
            self.switchable,
        )


@dataclass(frozen=True, slots=True)
class Observation:
    """``roles``: prefill and decode. ``recent``: what was seen of requests, for people."""

    roles: Mapping[str, RoleState]
    recent: Recent = field(default_factory=Recent)


def observe(
    prefill: Nodes, decode: Nodes, window: DemandWindow, slo: Slo, attained: float, now_s: float
) -> Observation:
    """``attained``: the fraction of requests that should keep the SLO."""
    recent = window.recent(max(prefill.join_s, decode.join_s))
    queued_s = prefill_queue_s(prefill.views, now_s)
    ready = len(list(prefill.views))
    needs = {
        "prefill": prefill_need(
            recent.prefill(queued_s), slo, attained=attained, join_s=prefill.join_s, ready=ready
        ),
    }
    feeding = max(ready, needs["prefill"].nodes) / max(recent.compute_s, 1e-9)
    load = decode_load(decode.views, now_s).grown(recent.growth).fed(feeding, recent.output_tokens, slo)
    needs["decode"] = decode_need(load, slo)
    roles = {
        "prefill": prefill.state(needs["prefill"], recent.ttft_attained),
        "decode": decode.state(needs["decode"], recent.tbt_attained),
    }
    return Observation(roles, recent)
