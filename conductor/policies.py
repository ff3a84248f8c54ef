"""Placement policies by name: each picks one estimate of those that ``place`` computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from conductor.cluster_view import ClusterView
from conductor.placement import DecodeEstimate, PrefillEstimate, Reason

# Estimates are this uncertain anyway: among candidates this close to the best, the one that was given the
# fewest requests is taken, so that equal nodes share the work and the cache.
_TIE_RATIO = 1.05
_TIE_S = 1e-4


class Policy(Protocol):
    """Chooses among candidates; both sequences are non-empty and must not be changed."""

    @property
    def fetches(self) -> bool:
        """Whether a prefix may be read from another node."""
        ...

    def prefill(
        self, candidates: Sequence[PrefillEstimate], view: ClusterView
    ) -> tuple[PrefillEstimate, Reason]: ...

    def decode(self, candidates: Sequence[DecodeEstimate], view: ClusterView) -> DecodeEstimate: ...


@dataclass(frozen=True, slots=True)
class LeastTtft:
    """The default: the earliest first token, then the earliest last one."""

    fetches: bool = True

    def prefill(
        self, candidates: Sequence[PrefillEstimate], view: ClusterView
    ) -> tuple[PrefillEstimate, Reason]:
        best_s = min(candidate.ttft_s for candidate in candidates)
        near = [candidate for candidate in candidates if candidate.ttft_s <= best_s * _TIE_RATIO + _TIE_S]
        chosen = min(near, key=lambda c: (-c.local_tokens, c.num_placed, c.ttft_s, c.node_id))
        return chosen, _prefill_reason(chosen, candidates)

    def decode(self, candidates: Sequence[DecodeEstimate], view: ClusterView) -> DecodeEstimate:
        best_s = min(candidate.total_s for candidate in candidates)
        near = [candidate for candidate in candidates if candidate.total_s <= best_s * _TIE_RATIO + _TIE_S]
        return min(near, key=lambda c: (-c.local_tokens, c.num_running, c.num_placed, c.node_id))


@dataclass(frozen=True, slots=True)
class LeastLoaded:
    """The shortest queue, whatever is cached where."""

    fetches: bool = False

    def prefill(
        self, candidates: Sequence[PrefillEstimate], view: ClusterView
    ) -> tuple[PrefillEstimate, Reason]:
        return min(candidates, key=lambda c: (c.queue_s, c.num_placed, c.node_id)), Reason.LOAD

    def decode(self, candidates: Sequence[DecodeEstimate], view: ClusterView) -> DecodeEstimate:
        return min(candidates, key=lambda c: (c.wait_s, c.step_s, c.num_placed, c.node_id))


@dataclass(frozen=True, slots=True)
class RoundRobin:
    """One after the other."""

    fetches: bool = False

    def prefill(
        self, candidates: Sequence[PrefillEstimate], view: ClusterView
    ) -> tuple[PrefillEstimate, Reason]:
        return candidates[view.turn % len(candidates)], Reason.TURN

    def decode(self, candidates: Sequence[DecodeEstimate], view: ClusterView) -> DecodeEstimate:
        # The quotient moves the pairing on, so that each prefill node works with every decode node.
        turn = view.turn + view.turn // len(candidates)
        return candidates[turn % len(candidates)]


@dataclass(frozen=True, slots=True)
class Random:
    """Anyone."""

    fetches: bool = False

    def prefill(
        self, candidates: Sequence[PrefillEstimate], view: ClusterView
    ) -> tuple[PrefillEstimate, Reason]:
        return candidates[int(view.draw * len(candidates))], Reason.CHANCE

    def decode(self, candidates: Sequence[DecodeEstimate], view: ClusterView) -> DecodeEstimate:
        # The digits of the draw that the first choice did not use.
        draw = view.draw * 4096 % 1.0
        return candidates[int(draw * len(candidates))]


POLICIES: Mapping[str, Policy] = {
    "least-ttft": LeastTtft(),
    "least-loaded": LeastLoaded(),
    "round-robin": RoundRobin(),
    "random": Random(),
}


def _prefill_reason(chosen: PrefillEstimate, candidates: Sequence[PrefillEstimate]) -> Reason:
    if chosen.fetched_tokens:
        return Reason.TRANSFER
    if len(candidates) == 1:
        return Reason.ONLY
    others = [candidate.local_tokens for candidate in candidates if candidate is not chosen]
    return Reason.LOCALITY if chosen.local_tokens > max(others) else Reason.LOAD
