"""Where a request runs: one pure function over a view of the cluster."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import replace

from conductor.cluster_view import ClusterView, NodeView, PlaceRequest, Slo
from conductor.placement import DecodeEstimate, Placement, PrefillEstimate, Reason, Rejection, describe
from conductor.policies import POLICIES, Policy

# Candidates of each role that a placement remembers: a request's timeline must stay small in a large cluster.
_KEPT = 8


def place(
    request: PlaceRequest, view: ClusterView, slo: Slo, policy: Policy = POLICIES["least-ttft"]
) -> Placement | Rejection:
    """Choose a prefill and a decode node for ``request``, or say why not.

    Pure: equal arguments give equal answers, and nothing is changed. One last token needs no decode node.
    """
    decodes = request.remaining_tokens > 1
    if not view.prefill:
        return Rejection("no prefill node is up", role="prefill")
    if decodes and not view.decode:
        return Rejection("no decode node is up", role="decode")
    fitting = _with_room(request, view)
    if isinstance(fitting, Rejection):
        return fitting
    view = fitting

    prefills = estimate_prefills(request, view, fetches=policy.fetches)
    prefill, reason = policy.prefill(prefills, view)
    limit_s = min(slo.ttft_s, request.deadline_s)
    if prefill.ttft_s > limit_s:
        in_time = [estimate for estimate in prefills if estimate.ttft_s <= limit_s]
        if not in_time:
            best_s = min(estimate.ttft_s for estimate in prefills)
            return Rejection(
                f"the first token would take {best_s:.3g} s, {limit_s:.3g} s are allowed",
                retry_after_s=best_s - limit_s,
            )
        (prefill, _), reason = policy.prefill(in_time, view), Reason.DEADLINE
    if not decodes:
        return _placement(prefill, None, reason, prefills, ())

    estimates = estimate_decodes(request, prefill, view)
    decode = policy.decode(estimates, view)
    if not _in_time(decode, prefill, request, slo):
        in_time_decodes = [e for e in estimates if _in_time(e, prefill, request, slo)]
        # A late last token is still better than none: the deadline itself is kept by the request.
        if in_time_decodes:
            decode, reason = policy.decode(in_time_decodes, view), Reason.DEADLINE
    return _placement(prefill, decode, reason, prefills, estimates)


def estimate_prefills(request: PlaceRequest, view: ClusterView, *, fetches: bool) -> list[PrefillEstimate]:
    """One estimate for each prefill node, in the view's order."""
    # Leave one token uncached: prefill needs a query row to produce logits.
    usable = (request.num_tokens - 1) // view.block_size if request.reads_cache else 0
    source, longest = _longest(view, usable) if fetches else ("", 0)
    return [_estimate_prefill(request, view, node, usable, source, longest) for node in view.prefill]


def estimate_decodes(
    request: PlaceRequest, prefill: PrefillEstimate, view: ClusterView
) -> list[DecodeEstimate]:
    """One estimate for each decode node, in the view's order, given where the prefill runs."""
    num_blocks = -(-request.num_tokens // view.block_size)
    needed = num_blocks + -(-request.expected_tokens // view.block_size)
    return [_estimate_decode(request, prefill, view, node, num_blocks, needed) for node in view.decode]


def _with_room(request: PlaceRequest, view: ClusterView) -> ClusterView | Rejection:
    """The view without nodes whose whole pool is too small for the request."""

    # The first token's own KV must fit beside the prompt's, or nothing can be decoded.
    needed = request.num_tokens // view.block_size + 1
    smallest = min(node.num_blocks or needed for nodes in (view.prefill, view.decode) for node in nodes)
    if smallest >= needed:
        return view
    prefill = [node for node in view.prefill if not 0 < node.num_blocks < needed]
    decode = [node for node in view.decode if not 0 < node.num_blocks < needed]
    if prefill and (decode or request.remaining_tokens == 1):
        return replace(view, prefill=prefill, decode=decode)
    role, nodes = ("decode", view.decode) if prefill else ("prefill", view.prefill)
    # Of the last block one slot stays for the token to come.
    capacity = max(node.num_blocks for node in nodes) * view.block_size - 1
    return Rejection(
        f"{request.num_tokens} tokens do not fit: the largest KV pool of a {role} node holds {capacity}",
        capacity_tokens=capacity,
    )


def _longest(view: ClusterView, usable: int) -> tuple[str, int]:
    """The node with the longest prefix, and how much of it can be used."""
    holders = view.prefix_blocks
    if not usable or not holders:
        return "", 0
    source = max(holders, key=lambda node_id: (holders[node_id], node_id))
    return source, min(holders[source], usable)


def _estimate_prefill(
    request: PlaceRequest, view: ClusterView, node: NodeView, usable: int, source: str, longest: int
) -> PrefillEstimate:
    local_tokens = min(view.prefix_blocks.get(node.node_id, 0), usable) * view.block_size
    compute_s = node.cost.prefill_s(request.num_tokens - local_tokens, local_tokens, view.now_s)
    fetched_tokens = longest * view.block_size - local_tokens
    if fetched_tokens > 0:
        nbytes = fetched_tokens // view.block_size * view.block_nbytes
        fetch_s = view.links.seconds(source, node.node_id, nbytes)
        held = local_tokens + fetched_tokens
        rest_s = node.cost.prefill_s(request.num_tokens - held, held, view.now_s)
        if fetch_s + rest_s < compute_s:
            return PrefillEstimate(
                node_id=node.node_id,
                queue_s=node.queue_s,
                fetch_s=fetch_s,
                compute_s=rest_s,
                ttft_s=node.queue_s + fetch_s + rest_s,
                local_tokens=local_tokens,
                fetched_tokens=fetched_tokens,
                fetch_from=source,
                recompute_s=compute_s,
                num_placed=node.num_placed,
            )
    return PrefillEstimate(
        node_id=node.node_id,
        queue_s=node.queue_s,
        fetch_s=0.0,
        compute_s=compute_s,
        ttft_s=node.queue_s + compute_s,
        local_tokens=local_tokens,
        num_placed=node.num_placed,
    )


def _estimate_decode(
    request: PlaceRequest,
    prefill: PrefillEstimate,
    view: ClusterView,
    node: NodeView,
    num_blocks: int,
    needed: int,
) -> DecodeEstimate:
    held = min(view.prefix_blocks.get(node.node_id, 0), num_blocks)
    transfer_s = view.links.seconds(prefill.node_id, node.node_id, (num_blocks - held) * view.block_nbytes)
    step_s = node.cost.step_s(node.num_running + 1, node.num_context_tokens + request.num_tokens, view.now_s)
    decode_s = step_s * request.expected_tokens
    # Without room it waits until others end; each of those ahead holds about as much as this one wants.
    has_room = node.num_free_blocks >= needed - held
    wait_s = 0.0 if has_room else decode_s * (node.num_waiting + 1)
    return DecodeEstimate(
        node_id=node.node_id,
        transfer_s=transfer_s,
        wait_s=wait_s,
        step_s=step_s,
        total_s=transfer_s + wait_s + decode_s,
        local_tokens=held * view.block_size,
        num_running=node.num_running,
        num_placed=node.num_placed,
    )


def _in_time(decode: DecodeEstimate, prefill: PrefillEstimate, request: PlaceRequest, slo: Slo) -> bool:
    return decode.step_s <= slo.tbt_s and prefill.ttft_s + decode.total_s <= request.deadline_s


def _placement(
    prefill: PrefillEstimate,
    decode: DecodeEstimate | None,
    reason: Reason,
    prefills: Sequence[PrefillEstimate],
    decodes: Sequence[DecodeEstimate],
) -> Placement:
    return Placement(
        prefill=prefill,
        decode=decode,
        reason=reason,
        detail=describe(prefill, reason, prefills),
        prefill_candidates=heapq.nsmallest(_KEPT, prefills, key=lambda e: e.ttft_s),
        decode_candidates=heapq.nsmallest(_KEPT, decodes, key=lambda e: e.total_s),
    )
