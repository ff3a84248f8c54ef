"""Estimates of what a request would cost on one node, by the cost model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from moonpool.conductor.observing.slo import Slo
from moonpool.conductor.placing.cluster_view import ClusterView, PlaceRequest
from moonpool.conductor.placing.node_view import NodeView
from moonpool.conductor.placing.placement import DecodeEstimate, PrefillEstimate
from moonpool.conductor.placing.policies import Policy
from moonpool.kvstore.index.prefix_map import PrefixMap

_NO_SLOW = (0, 0)
# Where many nodes hold a prefix, the holders that are considered as sources.
_SOURCES = 16


@dataclass(frozen=True, slots=True)
class Source:
    """A node that the leading ``num_blocks`` of a request could be read from."""

    node_id: str
    num_blocks: int


def usable_blocks(request: PlaceRequest, view: ClusterView) -> int:
    """The longest prefix that can be used: prefill needs a query row, so one token is always computed."""
    return (request.num_tokens - 1) // view.block_size if request.reads_cache else 0


def longest_blocks(prefixes: Mapping[str, int]) -> int:
    """Blocks of the longest prefix on any node."""
    if isinstance(prefixes, PrefixMap):
        prefixes = prefixes.longest(1)
    return max(prefixes.values(), default=0)


def overdue_s(view: ClusterView, node_id: str) -> float:
    """How long a node stands still: it answers neither for its prefills nor for what others read of it."""
    node = view.prefill.get(node_id)
    return 0.0 if node is None else node.queue.overdue_s(view.now_s)


def sources(view: ClusterView, usable: int) -> Sequence[Source]:
    """Where to fetch a prefix from: the longest one, from the holder with the least busy link that does not
    stand still.

    When that link is busy, the longest prefix of a holder with an idle link comes second. Where bytes between
    regions have a cost, these are of each region.
    """
    holders: Mapping[str, int] = view.prefix_blocks
    if not usable or not holders:
        return ()
    if isinstance(holders, PrefixMap):
        holders = holders.longest(_SOURCES)
    busy = view.links.busy(view.now_s)
    if not view.links.regions:
        return _sources(view, holders, usable, busy)
    by_region: dict[str, dict[str, int]] = {}
    for node_id, num_blocks in holders.items():
        by_region.setdefault(view.links.region_of(node_id), {})[node_id] = num_blocks
    return [source for some in by_region.values() for source in _sources(view, some, usable, busy)]


def _sources(
    view: ClusterView, holders: Mapping[str, int], usable: int, busy: Mapping[str, float]
) -> Sequence[Source]:
    def rank(node_id: str) -> tuple[int, float, str]:
        return min(holders[node_id], usable), -busy.get(node_id, 0), node_id

    best = max(holders, key=rank)
    if overdue_s(view, best):
        longest = min(holders[best], usable)
        best = max(holders, key=lambda one: (holders[one] >= longest, -overdue_s(view, one), rank(one)))
    first = Source(best, min(holders[best], usable))
    if best not in busy:
        return (first,)
    idle = [node_id for node_id in holders if node_id not in busy]
    if not idle:
        return (first,)
    best = max(idle, key=lambda node_id: (holders[node_id], node_id))
    return first, Source(best, min(holders[best], usable))


def estimate_prefill(
    request: PlaceRequest,
    view: ClusterView,
    policy: Policy,
    node: NodeView,
    usable: int,
    fetchable: Sequence[Source],
    slo: Slo,
) -> PrefillEstimate:
    """Queue, fetch, load and compute on ``node``, with the prefix that the policy would use there.

    ``slo``: its TBT is the longest step that the node makes while it decodes; a policy may let prefills wait
    that miss its TTFT.
    """
    now_s, block_size, num_tokens = view.now_s, view.block_size, request.num_tokens
    cost, queue, node_id = node.cost, node.queue, node.node_id
    factor = cost.prefill_correction.factor(now_s)
    local_blocks = min(view.prefix_blocks.get(node_id, 0), usable)
    local_tokens = local_blocks * block_size
    recompute_s = factor * cost.profile.prefill_s(num_tokens - local_tokens, local_tokens)
    load_s = _load_s(view, node, local_blocks) if local_blocks else 0.0
    load_s += _adapter_s(request, node)
    rtt_s = view.links.regions.between(request.origin, node.region).rtt_s if request.origin else 0.0

    def estimate(
        own_s: float, source: Source | None, transfer_s: float, nbytes: int = 0, late: bool = False
    ) -> PrefillEstimate:
        cached_tokens = source.num_blocks * block_size if source else local_tokens
        compute_s = own_s + _steps_between_s(view, node, own_s, num_tokens - cached_tokens, slo.tbt_s)
        order_s = now_s + request.fairness_delay_s + policy.patience_s(compute_s, late)
        queue_s = node.foreign_queue_s + queue.wait_s(now_s, order_s)
        late_load_s = load_s - queue_s if load_s > queue_s else 0.0
        fetch_s = max(load_s + transfer_s - queue_s, 0.0) - late_load_s if source else 0.0
        ttft_s = queue_s + fetch_s + late_load_s + compute_s + rtt_s
        if ttft_s > slo.ttft_s and not late:
            return estimate(own_s, source, transfer_s, nbytes, late=True)
        return PrefillEstimate(
            node_id,
            queue_s,
            fetch_s,
            compute_s,
            ttft_s,
            local_tokens,
            late_load_s,
            (source.num_blocks - local_blocks) * block_size if source else 0,
            source.node_id if source else "",
            transfer_s,
            recompute_s if source else 0.0,
            queue.behind(order_s),
            node.num_placed,
            own_s * node.num_running,
            rtt_s,
            view.links.egress_s(source.node_id, node_id, nbytes) if source else 0.0,
        )

    unaided = best = estimate(recompute_s, None, 0.0)
    for source in fetchable:
        missing = source.num_blocks - local_blocks
        if missing <= 0 or source.node_id == node_id:
            continue
        nbytes = missing * view.block_nbytes
        transfer_s = view.links.seconds(source.node_id, node_id, nbytes, now_s)
        still_s = overdue_s(view, source.node_id)
        transfer_s += _source_s(view, node, source, local_blocks) + still_s
        cached_tokens = source.num_blocks * block_size
        rest_s = factor * cost.profile.prefill_s(num_tokens - cached_tokens, cached_tokens)
        fetching = estimate(rest_s, source, transfer_s, nbytes)
        fetching_s = fetching.ttft_s + fetching.egress_s
        if best.fetched_tokens and best.ttft_s + best.egress_s <= fetching_s:
            continue
        if still_s and unaided.ttft_s <= fetching_s:
            continue  # also where the policy would fetch whatever it costs
        if policy.takes(local_blocks, source.num_blocks, fetching_s, unaided.ttft_s):
            best = fetching
    return best


def estimate_decode(
    request: PlaceRequest, view: ClusterView, prefill: PrefillEstimate, node: NodeView
) -> DecodeEstimate:
    """Transfer, room and steps on ``node``, for a request prefilled as ``prefill`` says."""
    block_size, num_tokens, now_s = view.block_size, request.num_tokens, view.now_s
    num_blocks = -(-num_tokens // block_size)
    needed = num_blocks + -(-request.expected_tokens // block_size)
    local_blocks = min(view.prefix_blocks.get(node.node_id, 0), num_blocks)
    nbytes = (num_blocks - local_blocks) * view.block_nbytes
    here = prefill.node_id == node.node_id
    links = view.links
    transfer_s = 0.0 if here else _hand_over_s(view, prefill, node, nbytes) + _adapter_s(request, node)
    profile, running = node.cost.profile, node.num_running
    factor = node.cost.decode_correction.factor(now_s)
    step_s = factor * profile.step_s(running + 1, node.num_context_tokens + num_tokens)
    decode_s = step_s * request.expected_tokens
    # Without room it waits until others end; each of those ahead needs about as much as this one.
    has_room = node.num_free_blocks >= needed - local_blocks
    wait_s = 0.0 if has_room else decode_s * (node.num_waiting + 1)
    longer_s = factor * profile.step_growth_s(num_tokens)
    # Prompts that it still computes when this one is prefilled take a part of its steps.
    prompts_s = node.foreign_queue_s + node.queue.wait_s(now_s) - prefill.ttft_s
    if not here and prompts_s > 0:
        decode_s += prompts_s
    return DecodeEstimate(
        node.node_id,
        transfer_s,
        wait_s,
        step_s,
        transfer_s + wait_s + decode_s,
        local_blocks * block_size,
        longer_s * running * request.expected_tokens,
        running,
        node.num_placed,
        0.0 if here else links.egress_s(prefill.node_id, node.node_id, nbytes),
    )


def _hand_over_s(view: ClusterView, prefill: PrefillEstimate, node: NodeView, nbytes: int) -> float:
    """Seconds from the first token until ``node`` has the prompt's ``nbytes``.

    It reads each chunk while the next one is computed. Left are the last chunk, and what the link does not
    carry in the time of the prefill, in which the two also connect.
    """

    def seconds(count: int) -> float:
        return view.links.seconds(prefill.node_id, node.node_id, count, view.now_s, connected=True)

    source = view.prefill.get(prefill.node_id)
    chunk_tokens = source.chunk_tokens if source is not None else 0
    last = -(-chunk_tokens // view.block_size) * view.block_nbytes
    if not 0 < last < nbytes:
        return seconds(nbytes)
    return max(seconds(nbytes) - prefill.compute_s, seconds(last))


def _steps_between_s(
    view: ClusterView, node: NodeView, compute_s: float, num_tokens: int, tbt_s: float
) -> float:
    """Seconds of the decode steps that share their steps with a prompt's ``num_tokens``."""
    if not node.num_running:
        return 0.0
    step_s = node.cost.step_s(node.num_running, node.num_context_tokens, view.now_s)
    num_steps = num_tokens / node.chunk_tokens if node.chunk_tokens else 1.0
    if tbt_s < math.inf:
        # At least a block of the prompt is in every step, however long that takes.
        num_steps = max(num_steps, min(compute_s / max(tbt_s - step_s, 1e-9), num_tokens / view.block_size))
    return step_s * math.ceil(num_steps)


def _load_s(view: ClusterView, node: NodeView, num_blocks: int) -> float:
    """Load the leading local blocks into the pool of the node."""
    slow = view.slow_blocks.get(node.node_id, _NO_SLOW)
    if slow is _NO_SLOW:
        return 0.0
    host, ssd = slow
    # The beginning of the prefix is used, and the slowest copies are at its end.
    unused = max(view.prefix_blocks[node.node_id] - num_blocks, 0)
    ssd, unused = max(ssd - unused, 0), max(unused - ssd, 0)
    return node.cost.load_s(max(host - unused, 0) * view.block_nbytes, ssd * view.block_nbytes)


def _adapter_s(request: PlaceRequest, node: NodeView) -> float:
    """Load the request's LoRA adapter, where it is not in memory."""
    return 0.0 if not request.adapter or request.adapter in node.resident_adapters else node.adapter_load_s


def _source_s(view: ClusterView, node: NodeView, source: Source, local_blocks: int) -> float:
    """Seconds in which the source itself makes the blocks readable: blocks on SSD are read first."""
    slow = view.slow_blocks.get(source.node_id, _NO_SLOW)
    if slow is _NO_SLOW:
        return 0.0
    fetched = source.num_blocks - local_blocks
    # A source need not be a prefill node, so its disk is assumed to be like the reader's.
    return node.cost.load_s(0, min(slow[1], fetched) * view.block_nbytes)
