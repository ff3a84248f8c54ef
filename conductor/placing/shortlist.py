"""Which nodes are worth an estimate of their own: all of a small fleet, the best few of a large one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from moonpool.conductor.placing import node_table as rows
from moonpool.conductor.placing.cluster_view import ClusterView, PlaceRequest
from moonpool.conductor.placing.estimates import Source
from moonpool.conductor.placing.node_table import NodeTable
from moonpool.conductor.placing.node_view import NodeView
from moonpool.conductor.placing.placement import PrefillEstimate
from moonpool.conductor.placing.policies import Policy
from moonpool.kvstore.index.prefix_map import PrefixMap

# Nodes of a large fleet that are looked at one by one.
_LOOKED_AT = 16
# Among nodes equal but for this, the ones given fewer requests: what the estimates then go by as well.
_PLACED_S = 1e-6

_Array = npt.NDArray[np.float64]


def needed_blocks(request: PlaceRequest, view: ClusterView) -> int:
    """The first token's own KV must fit beside the prompt's, or nothing can be decoded."""
    return request.num_tokens // view.block_size + 1


def capacity_blocks(fleet: NodeTable) -> int:
    """Of the largest pool."""
    return max(node.num_blocks for node in fleet)


def prefill_shortlist(
    request: PlaceRequest, view: ClusterView, policy: Policy, usable: int, fetchable: Sequence[Source]
) -> Sequence[NodeView]:
    """Nodes in whose pools the request fits; empty: there is none.

    For policies that look at nothing (``Policy.first``) in their order, else in no particular one.
    """
    fleet, needed = view.prefill, needed_blocks(request, view)
    first = policy.first(view, len(fleet))
    if first is not None or fleet.small:
        nodes = _fitting(fleet.window(first, len(fleet)) if first else fleet, needed, view)
        return nodes if fleet.small else nodes[:_LOOKED_AT]
    table = fleet.table(view.now_s)
    score = np.maximum(table[rows.ENDS_S] - view.now_s, 0.0)
    score += table[rows.WAITING_S]
    score += table[rows.JITTER_S]
    score += table[rows.NUM_PLACED] * _PLACED_S
    if policy.counts_cache:
        score += _prefill_s(request, view, usable, fetchable)
    return _best(fleet, score, needed, view)


def decode_shortlist(
    request: PlaceRequest, view: ClusterView, prefill: PrefillEstimate
) -> Sequence[NodeView]:
    """Nodes in whose pools the request fits, in no particular order; empty: there is none."""
    fleet, needed = view.decode, needed_blocks(request, view)
    if fleet.small:
        return _fitting(fleet, needed, view)
    table = fleet.table(view.now_s)
    num_blocks = -(-request.num_tokens // view.block_size)
    held = np.minimum(_held(fleet, view.prefix_blocks), num_blocks)
    num_sequences, context_tokens = table[rows.NUM_RUNNING] + 1, table[rows.NUM_CONTEXT_TOKENS]
    score = fleet.costs(view.now_s).step_s(num_sequences, context_tokens + request.num_tokens)
    score *= request.expected_tokens
    wanted = num_blocks + -(-request.expected_tokens // view.block_size)
    has_room = table[rows.NUM_FREE_BLOCKS] + held >= wanted
    score *= np.where(has_room, 1.0, table[rows.NUM_WAITING] + 2)
    _, byte_s = view.links.usual
    score += (num_blocks - held) * (view.block_nbytes * byte_s)
    score += table[rows.JITTER_S]
    score += table[rows.NUM_PLACED] * _PLACED_S
    return _best(fleet, score, needed, view)


def _fitting(nodes: Sequence[NodeView], needed: int, view: ClusterView) -> Sequence[NodeView]:
    """Without nodes whose pools are too small, and without those to avoid if others are left."""
    fitting = [node for node in nodes if not 0 < node.num_blocks < needed]
    if view.avoid:
        return [node for node in fitting if node.node_id not in view.avoid] or fitting
    return fitting


def _best(fleet: NodeTable, score: _Array, needed: int, view: ClusterView) -> Sequence[NodeView]:
    score[fleet.table(view.now_s)[rows.NUM_BLOCKS] < needed] = np.inf
    for node_id in view.avoid:
        if (position := fleet.position(node_id)) is not None:
            score[position] *= 1e6
    best = np.argpartition(score, _LOOKED_AT)[:_LOOKED_AT].tolist()
    nodes = [fleet[position] for position in best]
    return _fitting(nodes, needed, view)


def _prefill_s(request: PlaceRequest, view: ClusterView, usable: int, fetchable: Sequence[Source]) -> _Array:
    """Fetch and compute on every node; loading from slower tiers is left to the closer look."""
    costs = view.prefill.costs(view.now_s)
    local = np.minimum(_held(view.prefill, view.prefix_blocks), usable) * float(view.block_size)
    compute_s = costs.prefill_s(request.num_tokens - local, local)
    if fetchable:
        held = fetchable[0].num_blocks * view.block_size
        latency_s, byte_s = view.links.usual
        fetch_s = (held - local) * (view.block_nbytes / view.block_size * byte_s) + latency_s
        fetch_s += costs.prefill_s(request.num_tokens - held, held)
        np.minimum(compute_s, fetch_s, out=compute_s)
    return compute_s


def _held(fleet: NodeTable, prefix_blocks: Mapping[str, int]) -> _Array:
    """Leading blocks that each node of the fleet holds."""
    if isinstance(prefix_blocks, PrefixMap):
        return prefix_blocks.spread(fleet.slots())
    held = np.zeros(len(fleet))
    for node_id, num_blocks in prefix_blocks.items():
        if (position := fleet.position(node_id)) is not None:
            held[position] = num_blocks
    return held
