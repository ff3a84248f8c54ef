"""Placement: one pure function over a view of the cluster."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter, itemgetter

from moonpool.conductor.observing.slo import Slo
from moonpool.conductor.placing.cluster_view import ClusterView, PlaceRequest
from moonpool.conductor.placing.estimates import estimate_decode, estimate_prefill, sources, usable_blocks
from moonpool.conductor.placing.node_view import NodeView
from moonpool.conductor.placing.placement import (
    DecodeEstimate,
    Path,
    Placement,
    PrefillEstimate,
    Reason,
    Rejection,
    describe,
)
from moonpool.conductor.placing.policies import POLICIES, Policy
from moonpool.conductor.placing.shortlist import capacity_blocks, decode_shortlist, prefill_shortlist

# Candidates of each role kept in a placement: timelines must stay small in a large cluster.
_KEPT = 8

_ttft_s = attrgetter("ttft_s")
_total_s = attrgetter("total_s")


def place(
    request: PlaceRequest, view: ClusterView, slo: Slo, policy: Policy = POLICIES["goodput"]
) -> Placement | Rejection:
    """Choose a prefill and a decode node for ``request``, or say why not.

    Two nodes, or one for both where the policy expects that to cost all requests together less: see
    ``Placement.path``. Pure: equal arguments give equal results, and nothing is changed. A single token needs
    no decode node.
    Rejects requests that fit no node, and requests without a first token within ``request.deadline_s``.
    """
    decodes = request.remaining_tokens > 1
    if not len(view.prefill):
        return Rejection("no prefill node is up", role="prefill")
    if decodes and not len(view.decode):
        return Rejection("no decode node is up", role="decode")

    usable = usable_blocks(request, view)
    fetchable = sources(view, usable) if policy.fetches else ()
    nodes: Sequence[NodeView] = prefill_shortlist(request, view, policy, usable, fetchable)
    if not nodes:
        return _too_large(request, view, "prefill")
    prefills = [estimate_prefill(request, view, policy, n, usable, fetchable, slo) for n in nodes]
    prefill, reason = policy.prefill(prefills, view, slo)
    if prefill.ttft_s > request.deadline_s:
        in_time = [estimate for estimate in prefills if estimate.ttft_s <= request.deadline_s]
        if not in_time:
            return _too_late(request, prefills)
        (prefill, _), reason = policy.prefill(in_time, view, slo), Reason.DEADLINE
    patience_s = _patience_s(request, prefill, slo, policy)
    if not decodes:
        return _placement(prefill, None, reason, prefills, (), patience_s, policy)

    alone = [node for node in nodes if node.serves_whole]
    nodes = decode_shortlist(request, view, prefill)
    if not nodes:
        return _too_large(request, view, "decode")
    estimates = [estimate_decode(request, view, prefill, node) for node in nodes]
    here = None if policy.weighs_paths else next((e for e in estimates if e.node_id == prefill.node_id), None)
    decode = here or policy.decode(estimates, view, slo)
    late = not _in_time(decode, prefill, request, slo)
    # A late last token is better than none: the request itself enforces the deadline.
    if late and not here and (in_time_too := [e for e in estimates if _in_time(e, prefill, request, slo)]):
        decode, reason = policy.decode(in_time_too, view, slo), Reason.DEADLINE
    placement = _placement(prefill, decode, reason, prefills, estimates, patience_s, policy)
    if not policy.weighs_paths:
        return placement
    known = {estimate.node_id: estimate for estimate in prefills}
    wholes = []
    for node in {node.node_id: node for node in (*nodes, *alone)}.values():
        if node.node_id in known or node.computes_rest:
            whole = known.get(node.node_id) or estimate_prefill(
                request, view, policy, node, usable, fetchable, slo
            )
            wholes.append((whole, estimate_decode(request, view, whole, node)))
    return _cheaper(placement, wholes, request, view, slo, policy)


def _cheaper(
    split: Placement,
    wholes: Sequence[tuple[PrefillEstimate, DecodeEstimate]],
    request: PlaceRequest,
    view: ClusterView,
    slo: Slo,
    policy: Policy,
) -> Placement:
    """The placement on one node that costs less than ``split``, or ``split``.

    A node of the role ``both`` may take any prompt, a decode node the short rest of one.
    """
    assert split.decode is not None
    limit_s = math.inf
    if split.prefill.ttft_s <= min(slo.ttft_s, request.deadline_s):
        limit_s = min(slo.ttft_s, request.deadline_s)
    needs_time = _in_time(split.decode, split.prefill, request, slo)
    found: list[tuple[float, str, PrefillEstimate, DecodeEstimate]] = []
    for prefill, decode in wholes:
        is_both = view.prefill.get(prefill.node_id) is not None
        if prefill.ttft_s > limit_s or (needs_time and not _in_time(decode, prefill, request, slo)):
            continue
        if is_both or policy.computes_rest(prefill, decode):
            # A decode node's time for prompts is in no estimate, as that of a fetch: it must gain as much.
            toll_s = 0.0 if is_both else policy.least_gain_s
            found.append((policy.cost_s(prefill, decode) + toll_s, prefill.node_id, prefill, decode))
    if not found:
        return split
    split_s = policy.cost_s(split.prefill, split.decode)
    best_s, node_id, prefill, decode = min(found, key=itemgetter(0, 1))
    one_s = f"{1e3 * best_s:.3g} ms in all on {node_id} alone"
    two = f"{1e3 * split_s:.3g} ms on {split.prefill.node_id} and {split.decode.node_id}"
    if split.path is not Path.SPLIT and best_s >= split_s:
        return split
    if best_s > split_s:
        return replace(split, detail=f"{split.detail}; {two}, {one_s}")
    reason, path = Reason.WHOLE, Path.WHOLE
    if view.prefill.get(node_id) is None:
        reason, path = Reason.REST, Path.REST
    detail = f"{one_s}, {two}" if split.path is Path.SPLIT else f"{one_s}, the least"
    patience_s = _patience_s(request, prefill, slo, policy)
    return replace(
        split,
        prefill=prefill,
        decode=decode,
        reason=reason,
        detail=detail,
        patience_s=patience_s,
        path=path,
    )


def _patience_s(request: PlaceRequest, prefill: PrefillEstimate, slo: Slo, policy: Policy) -> float:
    # As in the estimate: one that is late in its turn is late behind others, too.
    late = prefill.ttft_s > slo.ttft_s
    return request.fairness_delay_s + policy.patience_s(prefill.compute_s, late)


def _too_large(request: PlaceRequest, view: ClusterView, role: str) -> Rejection:
    # One slot of the last block is for the first output token.
    fleet = view.prefill if role == "prefill" else view.decode
    capacity = capacity_blocks(fleet) * view.block_size - 1
    return Rejection(
        f"{request.num_tokens} tokens do not fit: the largest KV pool of a {role} node holds {capacity}",
        capacity_tokens=capacity,
    )


def _too_late(request: PlaceRequest, prefills: Sequence[PrefillEstimate]) -> Rejection:
    best_s = min(estimate.ttft_s for estimate in prefills)
    return Rejection(
        f"the first token would take {best_s:.3g} s, {request.deadline_s:.3g} s are allowed",
        retry_after_s=best_s - request.deadline_s,
    )


def _in_time(decode: DecodeEstimate, prefill: PrefillEstimate, request: PlaceRequest, slo: Slo) -> bool:
    return decode.step_s <= slo.tbt_s and prefill.ttft_s + decode.total_s <= request.deadline_s


def _placement(
    prefill: PrefillEstimate,
    decode: DecodeEstimate | None,
    reason: Reason,
    prefills: Sequence[PrefillEstimate],
    decodes: Sequence[DecodeEstimate],
    patience_s: float,
    policy: Policy,
) -> Placement:
    one = decode is not None and decode.node_id == prefill.node_id
    return Placement(
        prefill,
        decode,
        reason,
        describe(prefill, reason, prefills),
        sorted(prefills, key=_ttft_s)[:_KEPT],
        sorted(decodes, key=_total_s)[:_KEPT],
        patience_s,
        policy.name,
        Path.PREFILL if decode is None else Path.WHOLE if one else Path.SPLIT,
    )
