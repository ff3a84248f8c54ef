"""The nodes that get an estimate: all of a small fleet, the best few of a large one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from moonpool.conductor.placing import node_table as rows
from moonpool.conductor.placing.cluster_view import ClusterView, PlaceRequest
from moonpool.conductor.placing.estimates import Source, overdue_s
from moonpool.conductor.placing.node_table import NodeTable
from moonpool.conductor.placing.node_view import NodeView
from moonpool.conductor.placing.placement import PrefillEstimate
from moonpool.conductor.placing.policies import Policy
from moonpool.kvstore.index.prefix_map import PrefixMap

# Nodes of a large fleet that get an estimate.
_ESTIMATED = 16
# Breaks ties in favour of nodes with fewer requests, as the estimates do.
_PLACED_S = 1e-6
# Longer than any wait, so that a node with a pool too small for the answer is among the last.
_CUT_SHORT_S = 1e6

_Array = npt.NDArray[np.float64]


def needed_blocks(request: PlaceRequest, view: ClusterView) -> int:
    """Blocks of the prompt and the first token."""
    return request.num_tokens // view.block_size + 1


def capacity_blocks(fleet: NodeTable) -> int:
    """Blocks of the largest pool."""
    return max(node.num_blocks for node in fleet)


def prefill_shortlist(
    request: PlaceRequest, view: ClusterView, policy: Policy, usable: int, fetchable: Sequence[Source]
) -> Sequence[NodeView]:
    """Nodes with a pool that the request fits; empty: there is none.

    In the policy's order if it has one (``Policy.first``).
    """
    fleet, needed = view.prefill, needed_blocks(request, view)
    first = policy.first(view, len(fleet))
    if first is not None or fleet.small:
        nodes = _fitting(fleet.window(first, len(fleet)) if first else fleet, needed, view)
        return nodes if fleet.small else nodes[:_ESTIMATED]
    table = fleet.table(view.now_s)
    score = np.maximum(table[rows.ENDS_S] - view.now_s, view.now_s - table[rows.DUE_S])
    np.maximum(score, 0.0, out=score)
    score += table[rows.WAITING_S]
    score += table[rows.JITTER_S]
    score += table[rows.NUM_PLACED] * _PLACED_S
    if policy.counts_cache:
        score += _prefill_s(request, view, usable, fetchable)
        if request.origin:
            regions = view.links.regions
            score += _by_region(fleet, lambda region: regions.between(request.origin, region).rtt_s)
    return _best(fleet, score, needed, view)


def decode_shortlist(
    request: PlaceRequest, view: ClusterView, prefill: PrefillEstimate
) -> Sequence[NodeView]:
    """Nodes with a pool that the request fits, in no particular order; empty: there is none.

    Where a pool holds the whole answer, nodes with smaller pools are left out.
    """
    fleet, needed = view.decode, needed_blocks(request, view)
    if (same := view.prefill.get(prefill.node_id)) is not None and same.serves_whole:
        return _fitting([same], needed, view)
    last_token = request.num_tokens + request.remaining_tokens - 1
    whole = max(needed, last_token // view.block_size + 1)
    if fleet.small:
        nodes = _fitting((node for node in fleet if not node.serves_whole), needed, view)
        return _roomiest(nodes, whole)
    table = fleet.table(view.now_s)
    num_blocks = -(-request.num_tokens // view.block_size)
    local = np.minimum(_local_blocks(fleet, view.prefix_blocks), num_blocks)
    num_sequences, context_tokens = table[rows.NUM_RUNNING] + 1, table[rows.NUM_CONTEXT_TOKENS]
    score = fleet.costs(view.now_s).step_s(num_sequences, context_tokens + request.num_tokens)
    score *= request.expected_tokens
    wanted = num_blocks + -(-request.expected_tokens // view.block_size)
    has_room = table[rows.NUM_FREE_BLOCKS] + local >= wanted
    score *= np.where(has_room, 1.0, table[rows.NUM_WAITING] + 2)
    _, byte_s = view.links.usual
    score += (num_blocks - local) * (view.block_nbytes * byte_s)
    if (regions := view.links.regions) and same is not None:
        nbytes, source = num_blocks * view.block_nbytes, same.region
        score += _by_region(
            fleet,
            lambda region: (
                nbytes / regions.between(source, region).nbytes_per_s
                + regions.egress_s(source, region, nbytes)
            ),
        )
    score += table[rows.JITTER_S]
    score += table[rows.NUM_PLACED] * _PLACED_S
    pools = table[rows.NUM_BLOCKS]
    score += np.where(pools < min(whole, pools.max()), _CUT_SHORT_S, 0.0)
    return _roomiest(_best(fleet, score, needed, view), whole)


def _by_region(fleet: NodeTable, cost_s: Callable[[str], float]) -> _Array:
    """What each node's region costs."""
    costs = {region: cost_s(region) for region in {node.region for node in fleet}}
    return np.fromiter((costs[node.region] for node in fleet), np.float64, len(fleet))


def _roomiest(nodes: Sequence[NodeView], whole: int) -> Sequence[NodeView]:
    """Those with ``whole`` blocks; if there are none, those with the most."""
    sizes = [node.num_blocks or whole for node in nodes]
    wanted = min(whole, max(sizes, default=0))
    return [node for node, num_blocks in zip(nodes, sizes, strict=True) if num_blocks >= wanted]


def _fitting(nodes: Iterable[NodeView], needed: int, view: ClusterView) -> Sequence[NodeView]:
    """Without nodes with too small a pool, and without those to avoid if others are left."""
    fitting = [node for node in nodes if not 0 < node.num_blocks < needed]
    if view.avoid:
        return [node for node in fitting if node.node_id not in view.avoid] or fitting
    return fitting


def _best(fleet: NodeTable, score: _Array, needed: int, view: ClusterView) -> Sequence[NodeView]:
    score[fleet.table(view.now_s)[rows.NUM_BLOCKS] < needed] = np.inf
    for node_id in view.avoid:
        if (position := fleet.position(node_id)) is not None:
            score[position] *= 1e6
    best = np.argpartition(score, _ESTIMATED)[:_ESTIMATED].tolist()
    nodes = [fleet[position] for position in best]
    return _fitting(nodes, needed, view)


def _prefill_s(request: PlaceRequest, view: ClusterView, usable: int, fetchable: Sequence[Source]) -> _Array:
    """Fetch and compute on every node; loads from slower tiers are left to the estimates."""
    costs = view.prefill.costs(view.now_s)
    local = np.minimum(_local_blocks(view.prefill, view.prefix_blocks), usable) * float(view.block_size)
    compute_s = costs.prefill_s(request.num_tokens - local, local)
    if fetchable:
        cached = fetchable[0].num_blocks * view.block_size
        latency_s, byte_s = view.links.usual
        fetch_s = (cached - local) * (view.block_nbytes / view.block_size * byte_s)
        fetch_s += latency_s + overdue_s(view, fetchable[0].node_id)
        fetch_s += costs.prefill_s(request.num_tokens - cached, cached)
        np.minimum(compute_s, fetch_s, out=compute_s)
    return compute_s


def _local_blocks(fleet: NodeTable, prefix_blocks: Mapping[str, int]) -> _Array:
    """Leading blocks on each node of the fleet."""
    if isinstance(prefix_blocks, PrefixMap):
        return prefix_blocks.spread(fleet.slots())
    blocks = np.zeros(len(fleet))
    for node_id, num_blocks in prefix_blocks.items():
        if (position := fleet.position(node_id)) is not None:
            blocks[position] = num_blocks
    return blocks
