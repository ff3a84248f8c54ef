"""Clusters as placement sees them, made by hand."""

from __future__ import annotations

from typing import Any

from moonpool.conductor.costs.links import LinkModel
from moonpool.conductor.costs.model import NodeCost, Profile
from moonpool.conductor.observing.slo import Slo
from moonpool.conductor.placing.cluster_view import ClusterView, PlaceRequest
from moonpool.conductor.placing.node_table import NodeTable
from moonpool.conductor.placing.node_view import NodeView
from moonpool.conductor.placing.place import place
from moonpool.conductor.placing.placement import Placement
from moonpool.conductor.placing.policies import POLICIES

PROFILE = Profile(
    prefill_base_s=1e-3,
    prefill_token_s=1e-4,
    prefill_attention_s=0.0,
    decode_base_s=1e-3,
    decode_sequence_s=1e-4,
    decode_context_s=1e-8,
)
REQUEST = PlaceRequest(num_tokens=1000, remaining_tokens=100, expected_tokens=50, deadline_s=60.0)


def node(node_id: str, *, queue_s: float = 0.0, **facts: Any) -> NodeView:
    view = NodeView(node_id, NodeCost(PROFILE), num_free_blocks=1000)
    if queue_s:
        view.queue.add("running", order_s=0.0, compute_s=queue_s, now_s=0.0)
    for name, value in facts.items():
        setattr(view, name, value)
    return view


def cluster(
    prefill: list[NodeView], decode: list[NodeView], prefix_blocks: dict[str, int] | None = None
) -> ClusterView:
    return ClusterView(
        prefill=NodeTable(prefill),
        decode=NodeTable(decode),
        prefix_blocks=prefix_blocks or {},
        links=LinkModel(connect_s=0.0),
        block_size=16,
        block_nbytes=65536,
        now_s=0.0,
    )


def placed(request: PlaceRequest, view: ClusterView, policy: str = "goodput") -> Placement:
    outcome = place(request, view, Slo(), POLICIES[policy])
    assert isinstance(outcome, Placement)
    return outcome
