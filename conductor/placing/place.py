"""Placement: one pure function over a view of the cluster."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

from moonpool.conductor.observing.slo import Slo
from moonpool.conductor.placing.cluster_view import ClusterView, PlaceRequest
from moonpool.conductor.placing.estimates import estimate_decode, estimate_prefill, sources, usable_blocks
from moonpool.conductor.placing.node_view import NodeView
from moonpool.conductor.placing.placement import (
    DecodeEstimate,
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

    Pure: equal arguments give equal results, and nothing is changed. A single token needs no decode node.
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
    prefills = [estimate_prefill(request, view, policy, n, usable, fetchable) for n in nodes]
    prefill, reason = policy.prefill(prefills, view, slo)
    if prefill.ttft_s > request.deadline_s:
        in_time = [estimate for estimate in prefills if estimate.ttft_s <= request.deadline_s]
        if not in_time:
            return _too_late(request, prefills)
        (prefill, _), reason = policy.prefill(in_time, view, slo), Reason.DEADLINE
    patience_s = request.fairness_delay_s + policy.patience_s(prefill.compute_s)
    if not decodes:
        return _placement(prefill, None, reason, prefills, (), patience_s, policy)

    nodes = decode_shortlist(request, view, prefill)
    if not nodes:
        return _too_large(request, view, "decode")
    estimates = [estimate_decode(request, view, prefill, node) for node in nodes]
    decode = policy.decode(estimates, view, slo)
    late = not _in_time(decode, prefill, request, slo)
    # A late last token is better than none: the request itself enforces the deadline.
    if late and (in_time_too := [e for e in estimates if _in_time(e, prefill, request, slo)]):
        decode, reason = policy.decode(in_time_too, view, slo), Reason.DEADLINE
    return _placement(prefill, decode, reason, prefills, estimates, patience_s, policy)


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
    return Placement(
        prefill,
        decode,
        reason,
        describe(prefill, reason, prefills),
        sorted(prefills, key=_ttft_s)[:_KEPT],
        sorted(decodes, key=_total_s)[:_KEPT],
        patience_s,
        policy.name,
    )
