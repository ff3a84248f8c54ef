"""From views of nodes and recent demand to the state that the planner decides on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from moonpool.conductor.observing.slo import Slo
from moonpool.conductor.placing.node_view import NodeView
from moonpool.conductor.planning.loads import Need, decode_load, decode_need, prefill_need, prefill_queue_s
from moonpool.conductor.planning.plan import RoleState
from moonpool.conductor.planning.window import DemandWindow, Recent

# Until a node was seen to join.
UNKNOWN_JOIN_S = 30.0


@dataclass(frozen=True, slots=True)
class Nodes:
    """The nodes of one role. ``views``: of those that requests go to, by placement's tables, one for each
    replica. ``state``: theirs, before the need is known.
    """

    views: Iterable[NodeView]
    state: RoleState

    def with_need(self, need: Need, attained: float | None) -> RoleState:
        """``need``: in replicas."""
        replicas = max(round(len(list(self.views)) / max(self.state.num_ready, 1)), 1)
        return replace(self.state, need=Need(-(-need.nodes // replicas), need.why), attained=attained)


@dataclass(frozen=True, slots=True)
class Observation:
    """``roles``: prefill and decode. ``recent``: what was seen of requests, for people."""

    roles: Mapping[str, RoleState]
    recent: Recent = field(default_factory=Recent)


def observe(
    prefill: Nodes, decode: Nodes, window: DemandWindow, slo: Slo, attained: float, now_s: float
) -> Observation:
    """``attained``: the fraction of requests that should keep the SLO."""
    recent = window.recent(max(prefill.state.join_s, decode.state.join_s))
    queued_s = prefill_queue_s(prefill.views, now_s)
    ready = len(list(prefill.views))
    join_s = prefill.state.join_s
    need = prefill_need(recent.prefill(queued_s), slo, attained=attained, join_s=join_s, ready=ready)
    feeding = max(ready, need.nodes) / max(recent.compute_s, 1e-9)
    load = decode_load(decode.views, now_s).grown(recent.growth).fed(feeding, recent.output_tokens, slo)
    roles = {
        "prefill": prefill.with_need(need, recent.ttft_attained),
        "decode": decode.with_need(decode_need(load, slo), recent.tbt_attained),
    }
    return Observation(roles, recent)
